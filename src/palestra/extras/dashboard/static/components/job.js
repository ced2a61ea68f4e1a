/* Work that the server does for a while (export, re-score, test): its progress, and a button to cancel it. */

import { follow, send } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { notice, progress } from "./parts.js";

/** Starts a job by `begin()` (a request that answers {job}), shows it in `place`, and then what `done(result)` makes of it. */
export async function runJob(place, begin, done, signal) {
  replace(place, h("p.soft", "Starting …"));
  let job;
  try {
    ({ job } = await begin());
  } catch (error) {
    replace(place, notice("bad", error.message));
    return;
  }
  const cancel = h("button", { type: "button", onclick: () => send(`jobs/${job.id}`, {}, "DELETE") }, "Cancel");
  const ended = new Promise((resolve) => {
    const events = follow(
      `jobs/${job.id}/events`,
      {
        job: (fresh) => {
          job = fresh;
          if (job.state === "running") return drawRunning(place, job, cancel);
          events.close();
          resolve();
        },
      },
      signal,
    );
  });
  await ended;
  if (job.state === "done") replace(place, await done(job.result));
  else replace(place, notice(job.state === "failed" ? "bad" : "", job.error ?? "Cancelled."));
}

function drawRunning(place, job, cancel) {
  const { done = 0, total = 0, message = "" } = job.progress ?? {};
  replace(
    place,
    h("div.row.between", h("div", h("b", job.title), h("p.soft.small", message || "Working …")), cancel),
    total ? progress(done / total, job.title) : null,
  );
}
