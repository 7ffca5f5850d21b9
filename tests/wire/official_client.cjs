// What the official client for Node does, in a process of its own: node official_client.cjs HOST:PORT.
// The same as official_client.py; it writes its log under HOME.
"use strict";
const assert = require("node:assert");
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = require("rocketmq-client-nodejs");

const options = { endpoints: process.argv[2], namespace: "" };
const COMMIT = 1; // TransactionResolution.COMMIT of the protocol, which the package does not export

// Fails for "bad" always, and for what ends in a question mark the first time.
function listens(seen) {
    return {
        async consume(view) {
            const body = view.body.toString();
            const isFirst = seen.every(([other]) => other !== body);
            seen.push([body, view.deliveryAttempt]);
            const fails = body === "bad" || (body.endsWith("?") && isFirst);
            return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        },
    };
}

async function until(condition) {
    for (let waited = 0; !condition() && waited < 30_000; waited += 20) {
        await new Promise((resolve) => setTimeout(resolve, 20));
    }
    assert.ok(condition(), condition.toString());
}

async function received(consumer, count) {
    const found = [];
    while (found.length < count) {
        for (const view of await consumer.receive(32, 15_000)) {
            found.push(view);
            await consumer.ack(view);
        }
    }
    return found;
}

const bodies = (views) => views.map((view) => view.body.toString());

async function main() {
    const checker = { check: async () => COMMIT };
    const producer = new Producer({ ...options, topics: ["orders", "transfers", "jobs", "steps"], checker });
    await producer.startup();
    const send = (topic, body, fields = {}, transaction = undefined) =>
        producer.send({ topic, body: Buffer.from(body), ...fields }, transaction);
    const seen = [];
    const inOrder = [];
    const pushers = [
        [seen, "workers", "jobs"],
        [inOrder, "in-order", "steps"],
    ].map(
        ([list, consumerGroup, topic]) =>
            new PushConsumer({
                ...options,
                consumerGroup,
                subscriptions: new Map([[topic, "*"]]),
                messageListener: listens(list),
            }),
    );
    for (const pusher of pushers) await pusher.startup();
    for (const body of ["job?", "bad"]) await send("jobs", body);
    for (const body of ["1", "2?", "bad", "3"]) await send("steps", body, { messageGroup: "one" });

    const consumer = new SimpleConsumer({
        ...options,
        consumerGroup: "readers",
        awaitDuration: 5000,
        subscriptions: new Map([["orders", "odd"]]),
    });
    await consumer.startup();
    for (let number = 0; number < 50; number++) {
        const tag = number % 2 ? "odd" : "even";
        await send("orders", `${number}`, { tag, keys: [`k${number}`], properties: new Map([["number", `${number}`]]) });
    }
    const found = await received(consumer, 25);
    assert.deepStrictEqual(
        bodies(found)
            .map(Number)
            .sort((a, b) => a - b),
        Array.from({ length: 25 }, (_, index) => 2 * index + 1),
    );
    assert.ok(found.every((view) => view.properties.get("number") === view.body.toString()));

    for (let number = 0; number < 10; number++) await send("orders", `${number}`, { tag: "odd", messageGroup: "one" });
    assert.deepStrictEqual(bodies(await received(consumer, 10)), [..."0123456789"]);

    const recalled = await send("orders", "recalled", { tag: "odd", delay: 2000 });
    assert.strictEqual((await producer.recallMessage("orders", recalled.recallHandle)).messageId, recalled.messageId);
    await send("orders", "later", { tag: "odd", delay: 2000 });
    assert.deepStrictEqual(bodies(await received(consumer, 1)), ["later"]);

    consumer.unsubscribe("orders");
    await consumer.subscribe("transfers", new FilterExpression("*"));
    for (const [body, ends] of [["committed", "commit"], ["rolled back", "rollback"], ["orphan", null]]) {
        const transaction = producer.beginTransaction();
        await send("transfers", body, {}, transaction);
        if (ends !== null) await transaction[ends]();
    }
    assert.deepStrictEqual(bodies(await received(consumer, 2)).sort(), ["committed", "orphan"]);

    await until(() => seen.length === 4);
    assert.deepStrictEqual(seen.sort(), [["bad", 1], ["bad", 2], ["job?", 1], ["job?", 2]]);
    await until(() => inOrder.length === 6);
    assert.deepStrictEqual(
        inOrder.map(([body]) => body),
        ["1", "2?", "2?", "bad", "bad", "3"],
    );
    for (const client of [consumer, producer]) await client.shutdown(); // push consumers would wait for their long polls
    console.log("done");
    process.exit(0);
}

main().catch((error) => {
    console.error(error);
    process.exit(1);
});
