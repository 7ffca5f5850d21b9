// One scenario with the official Node client of RocketMQ 5: node client_of_5.cjs HOST:PORT TOPIC SCENARIO.
"use strict";
const assert = require("node:assert");
const { Producer, SimpleConsumer } = require("rocketmq-client-nodejs");

async function main(endpoints, topic, scenario) {
    const producer = new Producer({ endpoints, namespace: "", topics: [topic] });
    await producer.startup();
    const consumer = new SimpleConsumer({
        endpoints,
        namespace: "",
        consumerGroup: `${topic}-readers`,
        awaitDuration: 5000,
        subscriptions: new Map([[topic, scenario === "tags" ? "a" : "*"]]),
    });
    await consumer.startup();
    const inOrder = scenario === "order of a message group";
    for (let number = 0; number < 10; number++) {
        const fields = inOrder ? { messageGroup: "one" } : { tag: "ab"[number % 2] };
        await producer.send({ topic, body: Buffer.from(`${number}`), ...fields });
    }
    const expected = [...Array(10).keys()].filter((number) => scenario !== "tags" || number % 2 === 0);
    const numbers = [];
    for (let attempt = 0; attempt < 20 && numbers.length < expected.length; attempt++) {
        for (const view of await consumer.receive(32, 60_000)) {
            numbers.push(Number(view.body.toString()));
            await consumer.ack(view);
        }
    }
    if (!inOrder) numbers.sort((a, b) => a - b);
    assert.deepStrictEqual(numbers, expected);
    await consumer.shutdown();
    await producer.shutdown();
    console.log("done");
    process.exit(0);
}

main(...process.argv.slice(2)).catch((error) => {
    console.error(error);
    process.exit(1);
});
