/* Changed measures over stored rollouts: what would the rewards have been? Nothing is sampled, nothing is changed. */

import { Chart } from "../components/chart.js";
import { runJob } from "../components/job.js";
import { notice, select } from "../components/parts.js";
import { rolloutTable } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { table, tableCard } from "../components/table.js";
import { verdictPill } from "../components/verdicts.js";
import { get, runPath, send } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { integer, number, percent, plural } from "../lib/format.js";
import { oneLine } from "../lib/text.js";

const EXAMPLE = `from palestra import measure

@measure
def short_answer(ctx):
    return len(ctx.final_assistant_message.text) < 40`;

export async function show({ names: [id], signal }) {
  const [run, facets] = await Promise.all([getRun(id, signal), get(runPath(id, "facets"), {}, signal)]);
  if (!run.actions.includes("rescore"))
    return [runHead(run, "rescore"), notice("", "This run cannot be re-scored here.")];
  const place = h("div.stack", { "aria-live": "polite" });
  let kind = "train";
  const file = h("input", {
    id: "measures",
    required: true,
    placeholder: "measures.py",
    class: "mono",
    spellcheck: "false",
  });
  const begin = (event) => {
    event.preventDefault();
    runJob(
      place,
      () => send(runPath(id, "rescore"), { measures: file.value, kind, limit: null }),
      (result) => outcome(id, result, signal),
      signal,
    );
  };
  return [
    runHead(run, "rescore"),
    h(
      "div.stack",
      h(
        "form.card.stack",
        { onsubmit: begin },
        h(
          "p.soft",
          "Run changed measures over the rollouts that are stored. In a terminal: ",
          h("code", `palestra rescore ${run.id} --measures measures.py`),
        ),
        h(
          "div.row",
          h("div.field.grow", h("label", { for: "measures" }, "Python file with the measures, on the server"), file),
          h(
            "div.field",
            h("span.label", "Rollouts"),
            select(
              "Rollouts",
              Object.entries(facets.kinds).map(([name, n]) => [name, `${name} (${integer(n)})`]),
              kind,
              (value) => (kind = value),
            ),
          ),
        ),
        h("div", h("button.primary", { type: "submit" }, "Re-score")),
      ),
      place,
      h(
        "section.card",
        h("h2", "What the file looks like"),
        h("pre.code", EXAMPLE),
        run.measures.length
          ? h(
              "p.soft.small.below",
              "Named like one of the run's own, a measure is shown beside what that one scored: ",
              run.measures.map(({ name }, i) => [i ? ", " : "", h("code", name)]),
            )
          : null,
      ),
    ),
  ];
}

function outcome(id, result, signal) {
  const rate = (side) => (side ? `${number(side.mean)} · ${percent(side.pass_rate)}` : "–");
  const columns = [
    { label: "Measure", cell: (row) => h("b", row.name) },
    { label: "Was: mean · passed", cell: (row) => rate(row.old), kind: "num" },
    { label: "Would be", cell: (row) => rate(row.new), kind: "num" },
    { label: "Errors", cell: (row) => integer(row.new.errors), kind: "num" },
    { label: "Changed", cell: (row) => integer(row.changed), kind: "num" },
  ];
  const charts = Object.entries(result.series).map(([name, { old, new: fresh }]) => {
    const chart = new Chart({ title: name, signal });
    chart.draw(result.step, [
      ...(old ? [{ label: "was", values: old }] : []),
      { label: "would be", values: fresh, dashed: true },
    ]);
    return h("section.card", h("h2", name), chart.element);
  });
  return [
    tableCard(
      `${plural(result.count, "rollout")} scored again`,
      table(columns, result.measures, { label: "Measures, old and new" }),
    ),
    h("div.grid", charts),
    result.changed.length ? tableCard("Changed verdicts", changedTable(id, result.changed)) : null,
  ];
}

function changedTable(id, changed) {
  const rows = changed.map((change) => ({ ...change.rollout, change }));
  const side =
    (name) =>
    ({ change }) =>
      change[name] &&
      h(
        "span",
        { title: oneLine(change[name].reason ?? "", 300) },
        number(change[name].value),
        " ",
        verdictPill(change[name]),
      );
  return rolloutTable(id, rows, {
    label: "Changed verdicts",
    brief: true,
    extra: [
      { label: "Measure", cell: ({ change }) => change.measure },
      { label: "Was", cell: side("old") },
      { label: "Would be", cell: side("new") },
    ],
  });
}
