// The process of an adapter for Node.js, which does what adapter_process.py does for Python.
//
// `node adapter_process.mjs <adapter>` reads JSON calls from stdin and writes JSON answers to stdout;
// `node adapter_process.mjs <adapter> worker` runs one worker. The adapter is a module of this folder that exports
// TABLES, setup(), ready(), send(payload, due), sendMany(payloads, due) and work(handle), all of them asynchronous.
// NODE_PATH names the folder of the packages.

import fs from "node:fs";
import { createRequire } from "node:module";
import readline from "node:readline";

const require = createRequire(import.meta.url);

const PAYLOAD_BYTES = 200;
const INSERT = "INSERT INTO bench_effect (number, payload) VALUES ($1, $2)";
const UPDATE = "UPDATE bench_effect SET payload = $2 WHERE id = $1";
// See adapter_process.py.
const DOES = process.env.BENCH_DOES ?? "";
const AT_ONCE = Number(process.env.BENCH_AT_ONCE ?? 0);
const WAIT_MS = 1000 * Number(process.env.BENCH_WAIT_SECONDS ?? 0.1);
const MARK_BYTES = 32;
// For lateness: the shortest delay of a message, in seconds, and the pause of the sender, in ms.
const MIN_DELAY_SECONDS = 1.0;
const TICK_MS = 1;

/** The epoch time in seconds, finer than a millisecond. */
const now = () => (performance.timeOrigin + performance.now()) / 1000;
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

const COUNT_ALL = Boolean(process.env.BENCH_COUNT_ALL);

let file;
let pool;

/** Write a row, in a transaction or without one. */
async function write(payload) {
    const { Pool } = require("pg");
    pool ??= new Pool({ connectionString: process.env.DATABASE_URL });
    const text = DOES === "update" ? UPDATE : INSERT;
    const statement = { name: "write", text, values: [payload.n, JSON.stringify(payload)] };
    if (DOES === "autocommit") {
        await pool.query(statement);
        return;
    }
    const client = await pool.connect();
    try {
        await client.query("BEGIN");
        await client.query(statement);
        await client.query("COMMIT");
    } finally {
        client.release();
    }
}

/** Do what the handler has to do, and note what adapter_process.py notes. */
async function handle(payload) {
    if (DOES) await write(payload);
    if (AT_ONCE) await sleep(WAIT_MS);
    if (file && !(COUNT_ALL || payload.due || payload.last)) return;
    file ??= fs.openSync(process.env.BENCH_MARKS, "a");
    const mark = Buffer.alloc(MARK_BYTES);
    mark.writeBigInt64LE(BigInt(payload.n), 0);
    mark.writeDoubleLE(now(), 8);
    mark.writeDoubleLE(payload.due, 16);
    // Each worker leads a session of its own, so its number is that of the process.
    mark.writeBigInt64LE(BigInt(process.pid), 24);
    fs.writeSync(file, mark);
}

/** Return a payload of 200 bytes of JSON. */
function makePayload(n, due, more = {}) {
    const made = { n, due, ...more, pad: "" };
    made.pad = "x".repeat(PAYLOAD_BYTES - JSON.stringify(made).length);
    return made;
}

function payloads(number) {
    const more = (n) => (n === number ? { last: 1 } : {});
    return Array.from({ length: number }, (_, place) => makePayload(place + 1, 0, more(place + 1)));
}

const calls = (adapter, own) => ({
    describe: async () => ({
        verbs: ["send_many", "worker"],
        worker: [process.argv[1], own, "worker"],
        tables: adapter.TABLES,
        open: adapter.OPEN ?? "",
    }),
    setup: adapter.setup,
    ready: adapter.ready,

    async schedule({ number, delay, warm = 0 }) {
        const due = delay ? now() + delay : null;
        for (let n = 0; n < warm; n++) await adapter.send(makePayload(-n, 0), due);
        const made = payloads(number);
        const began = now();
        for (const one of made) await adapter.send(one, due);
        return now() - began;
    },

    async schedule_bulk({ number, delay }) {
        const due = delay ? now() + delay : null;
        const made = payloads(number);
        const began = now();
        await adapter.sendMany(made, due);
        return now() - began;
    },

    async late({ rate, seconds, longest }) {
        const began = now();
        const begin = began + longest;
        const end = begin + seconds;
        let sent = 0;
        let counted = 0;
        for (let at = now(); at < end; at = now()) {
            if (sent < Math.floor(rate * (at - began))) {
                const due = now() + MIN_DELAY_SECONDS + Math.random() * (longest - MIN_DELAY_SECONDS);
                counted += begin <= due && due < end ? 1 : 0;
                await adapter.send(makePayload(++sent, due), due);
            } else {
                await sleep(TICK_MS);
            }
        }
        return { sent, rate: sent / (now() - began), begin, end, counted };
    },
});

async function serve(adapter, own) {
    // What the system prints to stdout goes to stderr.
    console.log = console.info = console.error;
    const verbs = calls(adapter, own);
    for await (const line of readline.createInterface({ input: process.stdin })) {
        const { do: verb, ...call } = JSON.parse(line);
        let answer;
        try {
            answer = { answer: (await verbs[verb](call)) ?? null };
        } catch (error) {
            // The driver shows the last line.
            answer = { error: `${error.stack}\n${error}` };
        }
        fs.writeSync(1, JSON.stringify(answer) + "\n");
    }
    process.exit();
}

const [own, role] = process.argv.slice(2);
const adapter = await import(`./${own}.mjs`);
await (role === "worker" ? adapter.work(handle) : serve(adapter, own));
