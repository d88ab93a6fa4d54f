// The adapter of Graphile Worker with the settings that its documentation has for many jobs.

import * as installed from "./graphile_worker.mjs";

export const { TABLES, setup, ready, send, sendMany } = installed;

const TUNED = {
    concurrentJobs: 24,
    localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
};

export const work = (handle) => installed.work(handle, TUNED);
