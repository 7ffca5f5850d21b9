// Send a message with the official client for Node, due ten minutes after the send: node delayed.cjs HOST:PORT.
"use strict";
const { Producer } = require("rocketmq-client-nodejs");

async function main() {
    const producer = new Producer({ endpoints: process.argv[2], namespace: "", topics: ["later"] });
    await producer.startup();
    await producer.send({ topic: "later", body: Buffer.from("x"), delay: 600_000 });
    await producer.shutdown();
    process.exit(0);
}

main();
