/* Evaluations before, during and after training, with intervals, and which problems changed sides. */

import { interval, rateText } from "../components/interval.js";
import { empty, flipPill } from "../components/parts.js";
import { getRun, runHead } from "../components/run_head.js";
import { table, tableCard } from "../components/table.js";
import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { integer, number } from "../lib/format.js";
import { link } from "../lib/router.js";
import { oneLine } from "../lib/text.js";

export async function show({ names: [id], signal }) {
  const [run, data] = await Promise.all([getRun(id, signal), get(runPath(id, "evaluations"), {}, signal)]);
  if (!data.evaluations.length)
    return [
      runHead(run, "evaluations"),
      h("div.card", empty("No evaluation yet", "The first runs before training, unless it is switched off.")),
    ];
  const measures = [
    ...new Set(data.evaluations.flatMap((evaluation) => evaluation.measures.map((measure) => measure.name))),
  ];
  const card = (title, rateOf) =>
    h(
      "section.card",
      h("h2", title),
      h(
        "div.rates",
        data.evaluations.map((evaluation) => {
          const rate = rateOf(evaluation);
          return rate
            ? [
                h("a", { href: link(["runs", id, "rollouts"], { kind: evaluation.name }) }, evaluation.name),
                interval(rate, evaluation.name),
                rateText(rate),
              ]
            : null;
        }),
      ),
    );
  return [
    runHead(run, "evaluations"),
    h(
      "div.stack",
      h(
        "div.grid.wide",
        card("All measures pass", (evaluation) => evaluation.pass_rate),
        measures.length > 1
          ? measures.map((name) =>
              card(name, (evaluation) => evaluation.measures.find((m) => m.name === name)?.pass_rate),
            )
          : null,
      ),
      h(
        "p.soft.small",
        "Bars are 95 % intervals. Held-out problems, ",
        integer(data.evaluations[0].n),
        " attempts each.",
      ),
      data.flips ? flips(id, data.flips) : null,
    ),
  ];
}

function flips(id, found) {
  const columns = [
    {
      label: "Problem",
      cell: (row) =>
        h(
          "a.break",
          { href: link(["runs", id, "problems", row.problem_id], { kind: found.to }) },
          oneLine(row.question ?? row.problem_id, 110),
        ),
    },
    { label: "Change", cell: (row) => flipPill(row.direction) },
    {
      label: found.from,
      cell: (row) => row.from !== null && h("a", { href: link(["runs", id, "rollouts", row.from]) }, "open"),
    },
    {
      label: found.to,
      cell: (row) => row.to !== null && h("a", { href: link(["runs", id, "rollouts", row.to]) }, "open"),
    },
  ];
  const title = [
    h("h2", `From ${found.from} to ${found.to}`),
    h(
      "p.soft",
      h("b.good", integer(found.fixed)),
      " solved now, ",
      h("b.bad", integer(found.broken)),
      " lost, ",
      integer(found.same),
      " the same",
      found.p_value === null ? "" : `; McNemar p = ${number(found.p_value)}`,
    ),
  ];
  return tableCard(title, found.problems.length ? table(columns, found.problems, { label: "Flips" }) : null);
}
