// The adapter of BullMQ.

import { createRequire } from "node:module";

const { Queue, Worker } = createRequire(import.meta.url)("bullmq");
const { hostname, port } = new URL(process.env.REDIS_URL);
const NAME = "bench";
const CONCURRENCY = 50;

export const TABLES = [];
let queue;

const connection = () => ({ host: hostname, port: Number(port), maxRetriesPerRequest: null });
const options = (due) => (due === null ? {} : { delay: Math.max(0, Math.ceil(due * 1000 - Date.now())) });

export async function ready() {
    queue ??= new Queue(NAME, { connection: connection() });
}

export const setup = ready;

export async function send(payload, due) {
    await queue.add("mark", payload, options(due));
}

export async function sendMany(payloads, due) {
    for (let start = 0; start < payloads.length; start += 1000) {
        const some = payloads.slice(start, start + 1000);
        await queue.addBulk(some.map((data) => ({ name: "mark", data, opts: options(due) })));
    }
}

export async function work(handle) {
    const worker = new Worker(NAME, (job) => handle(job.data), { connection: connection(), concurrency: CONCURRENCY });
    await new Promise((done) => worker.on("closed", done));
}
