// A Taskline worker in Node's standard library (18 or newer): fetches, works, reports, keeps its leases alive.
//
//   TASKLINE_GATEWAY=http://127.0.0.1:8081 TASKLINE_API_KEY=tk_… node worker.mjs
//
// What it may rely on, and what it must do about each answer, is in docs/how-to/http-workers.md.
import { setTimeout as sleep } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';
import { hostname } from 'node:os';
import process from 'node:process';

const BASE = process.env.TASKLINE_GATEWAY ?? 'http://127.0.0.1:8081';
const CONCURRENCY = Number(process.env.WORKER_CONCURRENCY ?? 4);
const GRACE_MS = Number(process.env.WORKER_GRACE_SECONDS ?? 30) * 1000;
const WORKER_ID = process.env.WORKER_ID ?? `${hostname()}-${process.pid}`;
const HEADERS = {
  'content-type': 'application/json',
  ...(process.env.TASKLINE_API_KEY && { authorization: `Bearer ${process.env.TASKLINE_API_KEY}` }),
};

// A handler throws this when another attempt can't help, or to say when it can.
export class TaskError extends Error {
  constructor(message, { permanent = false, retryAfterSeconds } = {}) {
    super(message);
    Object.assign(this, { name: 'TaskError', permanent, retryAfterSeconds });
  }
}

// task type → handler(payload, { signal, attempt, taskId }); what it returns is the task's result.
export const handlers = {
  'demo.sum': ({ numbers }) => ({ sum: numbers.reduce((sum, each) => sum + each, 0) }),
  'demo.sleep': async ({ seconds }, { signal }) => {
    await sleep(seconds * 1000, undefined, { signal });
    return { slept: seconds };
  },
  'demo.fail': ({ message, permanent }, { attempt }) => {
    throw new TaskError(`${message} (attempt ${attempt})`, { permanent, retryAfterSeconds: permanent ? undefined : 1 });
  },
};

async function post(path, body, signal) {
  const answer = await fetch(BASE + path, { method: 'POST', headers: HEADERS, body: JSON.stringify(body), signal });
  return { status: answer.status, retryAfter: Number(answer.headers.get('retry-after') ?? 1), body: await answer.json() };
}

// A report is repeated until it is known whether it counts: 200 and 409 say so, and so does any refusal of the request itself.
async function report(task, kind, body, patienceMs) {
  const until = Date.now() + patienceMs;
  for (let pause = 0.2; ; pause = Math.min(pause * 2, 5)) {
    try {
      const { status, retryAfter, body: told } = await post(`/internal/tasks/${task.task_id}/${kind}`, { lease_token: task.lease_token, ...body });
      if (status < 500 && status !== 429) return { status, ...told };
      pause = Math.max(pause, retryAfter);
    } catch (error) {
      log('report failed; again', { kind, task_id: task.task_id, error: String(error.cause ?? error) });
    }
    if (Date.now() >= until) return { status: 0 };
    await sleep(Math.min(pause * 1000, until - Date.now()));
  }
}

async function keep(task, leaseSeconds, running) {
  // A third of the lease leaves two more chances.
  while (!running.signal.aborted) {
    await sleep((leaseSeconds / 3) * 1000, undefined, { signal: running.signal }).catch(() => {});
    if (running.signal.aborted) return;
    const { status, cancel_requested: cancel } = await report(task, 'extend', {}, (leaseSeconds / 3) * 1000);
    if (status === 409) running.abort(new Error('the lease does not hold any more'));
    if (cancel) running.abort(new TaskError('cancelled'));
  }
}

async function run(task, leaseSeconds) {
  const running = new AbortController();
  const limit = globalThis.setTimeout(() => running.abort(new Error('time limit')), task.timeout_seconds * 1000);
  const keeping = keep(task, leaseSeconds, running);
  const context = { signal: running.signal, attempt: task.attempt, taskId: task.task_id };
  log('working', { task_id: task.task_id, attempt: task.attempt });
  let answer;
  try {
    const result = await handlers[task.task_type](task.payload, context);
    answer = await report(task, 'complete', { result: result ?? null }, leaseSeconds * 1000);
  } catch (raised) {
    const error = running.signal.aborted ? running.signal.reason : raised;
    const told = { error_class: error.name, message: String(error.message), permanent: error.permanent ?? false };
    if (error.retryAfterSeconds !== undefined) told.retry_after_seconds = error.retryAfterSeconds;
    answer = await report(task, 'fail', told, leaseSeconds * 1000);
  } finally {
    clearTimeout(limit);
    running.abort();
    await keeping;
  }
  log('reported', { task_id: task.task_id, attempt: task.attempt, status: answer.status, outcome: answer.outcome });
}

const log = (event, facts) => console.log(JSON.stringify({ event, worker: WORKER_ID, ...facts }));

async function main() {
  const stopping = new AbortController();
  for (const name of ['SIGTERM', 'SIGINT']) process.once(name, () => stopping.abort());
  const inHand = new Set();
  while (!stopping.signal.aborted) {
    if (inHand.size >= CONCURRENCY) {
      await Promise.race(inHand);
      continue;
    }
    const wanted = { worker_id: WORKER_ID, task_types: Object.keys(handlers), batch_size: CONCURRENCY - inHand.size, wait_seconds: 20 };
    const { status, body, retryAfter } = await post('/internal/tasks/fetch', wanted, stopping.signal).catch(() => ({ status: 0, retryAfter: 1 }));
    for (const task of body?.tasks ?? []) {
      const doing = run(task, body.lease_duration_seconds).finally(() => inHand.delete(doing));
      inHand.add(doing);
    }
    if (status !== 200) await sleep(retryAfter * 1000, undefined, { signal: stopping.signal }).catch(() => {});
  }
  log('stopping', { in_hand: inHand.size });
  await Promise.race([Promise.all(inHand), sleep(GRACE_MS)]);
  process.exit(0); // What is left is run again when its lease ends.
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main();
