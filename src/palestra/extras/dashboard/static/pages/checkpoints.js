/* The checkpoints of a run: talk to one, or export it. */

import { runJob } from "../components/job.js";
import { empty, facts, select } from "../components/parts.js";
import { getRun, runHead } from "../components/run_head.js";
import { table } from "../components/table.js";
import { runPath, send } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { ago, bytes } from "../lib/format.js";

const FORMATS = [
  ["hf", "Hugging Face folder"],
  ["gguf", "GGUF file"],
];

export async function show({ names: [id], signal }) {
  const run = await getRun(id, signal);
  const place = h("div", { "aria-live": "polite" });
  let format = "hf";
  const exportOf = (checkpoint) =>
    runJob(
      place,
      () => send(runPath(id, "export"), { format, checkpoint }),
      (result) =>
        h(
          "section.card",
          h("h2", "Exported"),
          facts([
            ["Path", h("span.mono", result.path)],
            ["Size", bytes(result.bytes)],
            ["Files", (result.files ?? []).join(", ")],
          ]),
        ),
      signal,
    );
  const rows = [...(run.model_files ? [{ ...run.model_files, name: null }] : []), ...[...run.checkpoints].reverse()];
  const columns = [
    {
      label: "Checkpoint",
      cell: (row) => [
        h("b", row.name === null ? "Trained model" : `Step ${row.step}`),
        row.best ? [" ", h("span.pill.good", "best")] : null,
      ],
    },
    { label: "Saved", cell: (row) => h("span.soft", ago(row.created)), kind: "wide-only" },
    { label: "Size", cell: (row) => bytes(row.bytes), kind: "num" },
    {
      label: h("span.visually-hidden", "Actions"),
      cell: (row) =>
        h(
          "div.actions.end",
          run.actions.includes("export")
            ? h("button", { type: "button", onclick: () => exportOf(row.name) }, "Export")
            : null,
        ),
    },
  ];
  return [
    runHead(run, "checkpoints"),
    h(
      "div.stack",
      run.actions.includes("export")
        ? h(
            "label.small.soft",
            "Export as",
            select("Format of exports", FORMATS, format, (value) => (format = value)),
          )
        : null,
      place,
      h(
        "div.card.flush",
        rows.length
          ? table(columns, rows, { label: "Checkpoints" })
          : empty("No checkpoint yet", "The first is written while the run trains."),
      ),
    ),
  ];
}
