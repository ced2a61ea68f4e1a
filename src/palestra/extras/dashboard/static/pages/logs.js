/* The logs of a run's processes, followed. */

import { empty, segmented } from "../components/parts.js";
import { getRun, runHead } from "../components/run_head.js";
import { follow, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";

const MOST_LINES = 5000; // older ones leave the page, not the file
const AT_END = 40; // pixels: whoever is this near the end wants to see new lines

export async function show({ names: [id], signal }) {
  const run = await getRun(id, signal);
  if (!run.logs?.length)
    return [
      runHead(run, "logs"),
      h("div.card", empty("No logs", "Runs in the background have them; others print to their terminal.")),
    ];
  const log = h("div.log.card", { tabindex: 0, role: "log", "aria-label": "Log" });
  let source;
  const open = (part) => {
    source?.close();
    replace(log);
    source = follow(
      runPath(id, "logs", "events"),
      { lines: (data) => add(log, data.lines), end: () => source.close() },
      signal,
      { part },
    );
  };
  open(run.logs[0]);
  return [
    runHead(run, "logs"),
    h(
      "div.filters",
      segmented(
        "Process",
        run.logs.map((part) => [part, part]),
        run.logs[0],
        open,
      ),
    ),
    log,
  ];
}

function add(log, lines) {
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < AT_END;
  log.append(...lines.map((line) => h("div", line || " ")));
  while (log.childElementCount > MOST_LINES) log.firstElementChild.remove();
  if (follows) log.scrollTop = log.scrollHeight;
}
