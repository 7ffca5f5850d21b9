// A test of a worker with the official Node client, which moves the clock of `librmq serve --clock manual`.
// Run it by `node --test --test-force-exit worker.test.cjs`: a timer of the client keeps the process alive for a while.
const assert = require("node:assert");
const { spawn } = require("node:child_process");
const { once } = require("node:events");
const { mkdtempSync } = require("node:fs");
const { tmpdir } = require("node:os");
const { join } = require("node:path");
const { createInterface } = require("node:readline");
const { after, before, test } = require("node:test");
const { ConsumeResult, Producer, PushConsumer } = require("rocketmq-client-nodejs");

let librmq, ready;

before(async () => {
    const store = join(mkdtempSync(join(tmpdir(), "librmq-")), "store");
    librmq = spawn("librmq", ["serve", store, "--grpc", "0", "--clock", "manual", "--end-with-input"]);
    const [line] = await once(createInterface({ input: librmq.stdout }), "line");
    ready = JSON.parse(line);
});

after(async () => {
    librmq.kill();
    const [status] = await once(librmq, "exit");
    assert.strictEqual(status, 0);
});

async function control(path, fields) {
    const options = fields === undefined ? {} : { method: "POST", body: JSON.stringify(fields) };
    const response = await fetch(`http://${ready.control}${path}`, options);
    const answer = await response.json();
    assert.ok(response.ok, answer.error);
    return answer;
}

test("a job that always fails is a dead letter", async () => {
    const options = { endpoints: ready.grpc, namespace: "" };
    const attempts = [];
    const worker = new PushConsumer({
        ...options,
        consumerGroup: "workers",
        subscriptions: new Map([["jobs", "*"]]),
        messageListener: {
            async consume(job) {
                attempts.push(job.deliveryAttempt);
                return ConsumeResult.FAILURE;
            },
        },
    });
    const producer = new Producer({ ...options, topics: ["jobs"] });
    await worker.startup();
    await producer.startup();
    await producer.send({ topic: "jobs", body: Buffer.from("resize 7") });
    await control("/settle", {});
    assert.deepStrictEqual(attempts, [1]);
    await control("/advance", { hours: 8 }); // all retries
    const { dead_letters } = await control("/dead-letters?group=workers");
    assert.deepStrictEqual(dead_letters.map((letter) => atob(letter.body_b64)), ["resize 7"]);
    await producer.shutdown();
    await worker.shutdown();
});
