// A shop on RocketMQ's official client for Node, with `librmq serve` in the place of a cluster.
//
//     librmq serve store --grpc 8081
//     npm install rocketmq-client-nodejs
//     node examples/orders.mjs 127.0.0.1:8081
//
// It sends an order, one in half an hour that it recalls, and a payment in a transaction; a consumer takes the orders.
import { createRequire } from "node:module";

const { ConsumeResult, Producer, PushConsumer, SimpleConsumer } = createRequire(import.meta.url)("rocketmq-client-nodejs");

const options = { endpoints: process.argv[2] ?? "127.0.0.1:8081", namespace: "" };
const body = (what) => Buffer.from(JSON.stringify(what));

const producer = new Producer({ ...options, topics: ["orders", "payments"], checker: { check: async () => 1 } });
await producer.startup();

let done;
const taken = new Promise((resolve) => (done = resolve));
const worker = new PushConsumer({
    ...options,
    consumerGroup: "workers",
    subscriptions: new Map([["orders", "*"]]),
    messageListener: {
        async consume(message) {
            console.log(`${message.deliveryAttempt === 1 ? "failed" : "took"} ${message.body}`);
            if (message.deliveryAttempt === 1) return ConsumeResult.FAILURE; // comes again in a second
            done();
            return ConsumeResult.SUCCESS;
        },
    },
});
await worker.startup();

await producer.send({ topic: "orders", tag: "coat", keys: ["order-1"], body: body({ order: 1 }) });
const later = await producer.send({ topic: "orders", delay: 30 * 60_000, body: body({ order: 2 }) });
await producer.recallMessage("orders", later.recallHandle);
const payment = producer.beginTransaction();
await producer.send({ topic: "payments", body: body({ paid: 1 }) }, payment);
await payment.commit();

const books = new SimpleConsumer({ ...options, consumerGroup: "books", subscriptions: new Map([["payments", "*"]]) });
await books.startup();
for (const message of await books.receive(1, 15_000)) {
    console.log(`booked ${message.body}`);
    await books.ack(message);
}
await taken;
await books.shutdown();
await producer.shutdown();
process.exit(0);
