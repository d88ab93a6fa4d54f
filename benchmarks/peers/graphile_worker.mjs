// The adapter of Graphile Worker, with the settings by which its page on performance has measured it.

import { createRequire } from "node:module";

const { makeWorkerUtils, run } = createRequire(import.meta.url)("graphile-worker");
const connectionString = process.env.DATABASE_URL;
const PER_CALL = 1000;

export const TABLES = ["graphile_worker._private_jobs", "graphile_worker._private_job_queues"];
export const OPEN = "FROM graphile_worker._private_jobs";
const AT_ONCE = Number(process.env.BENCH_AT_ONCE ?? 0);
const BEST = {
    concurrentJobs: AT_ONCE || 24,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
};
let utils;

const options = (due) => (due === null ? {} : { runAt: new Date(Math.ceil(due * 1000)) });

export async function ready() {
    utils ??= await makeWorkerUtils({ connectionString });
}

export async function setup() {
    await ready();
    await utils.migrate();
}

export async function send(payload, due) {
    await utils.addJob("mark", payload, options(due));
}

export async function sendMany(payloads, due) {
    for (let start = 0; start < payloads.length; start += PER_CALL) {
        const some = payloads.slice(start, start + PER_CALL);
        await utils.addJobs(some.map((payload) => ({ identifier: "mark", payload, ...options(due) })));
    }
}

export async function work(handle) {
    const runner = await run({ preset: { worker: { connectionString, ...BEST } }, taskList: { mark: handle } });
    await runner.promise;
}
