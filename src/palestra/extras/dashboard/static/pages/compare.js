/* Several runs beside each other: what was set differently, and what came of it. */

import { Chart } from "../components/chart.js";
import { interval, rateText } from "../components/interval.js";
import { notice, pageHead, segmented, statusPill } from "../components/parts.js";
import { table, tableCard } from "../components/table.js";
import { get } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { integer, NONE, number, settingText } from "../lib/format.js";
import { link } from "../lib/router.js";

const TITLES = { reward_mean: "Reward", pass_rate: "Pass rate in training", "eval/pass_rate": "Pass rate, held out" };
const AXES = [
  ["step", "Step"],
  ["tokens", "Tokens"],
  ["seconds", "Wall time"],
];

export async function show({ query, signal }) {
  const data = await get("compare", { runs: query.get("runs") ?? "" }, signal);
  const label = labels(data.runs);
  const charts = Object.entries(TITLES)
    .filter(([name]) => data.runs.some((run) => data.curves[run.id]?.series[name]?.some((value) => value !== null)))
    .map(([name, title]) => ({ name, chart: new Chart({ title, percent: name !== "reward_mean", signal }) }));
  const draw = (axis) =>
    charts.forEach(({ name, chart }) => {
      chart.xLabel = axis;
      chart.draw(...joined(data.runs, data.curves, name, axis, label));
    });
  draw("step");
  return [
    pageHead("Compare", {
      crumbs: [["Runs", link(["runs"])]],
      lead: h(
        "span.row",
        data.runs.map((run) => h("a", { href: link(["runs", run.id]) }, label(run.id), " ", statusPill(run.state))),
      ),
    }),
    h(
      "div.stack",
      h("div.row.between", h("h2", "Curves"), segmented("By", AXES, "step", draw)),
      h(
        "div.grid.wide",
        charts.map(({ name, chart }) => h("section.card", h("h2", TITLES[name]), chart.element)),
      ),
      settings(data, label),
      evaluations(data, label),
      paired(data, label),
    ),
  ];
}

/** Runs of one name are told apart by their ids. */
function labels(runs) {
  const names = new Map(
    runs.map((run) => [
      run.id,
      runs.filter((other) => other.name === run.name).length > 1 ? `${run.name} ${run.id}` : run.name,
    ]),
  );
  return (id) => names.get(id) ?? id;
}

/** One x for all: the union of the runs' own, with gaps where a run has no point. */
function joined(runs, curves, name, axis, label) {
  const points = runs.map((run) => {
    const { series, [axis]: x } = curves[run.id] ?? { series: {} };
    return new Map((series[name] ?? []).map((value, i) => [x?.[i], value]));
  });
  const all = [...new Set(points.flatMap((map) => [...map.keys()]))]
    .filter((x) => Number.isFinite(x))
    .sort((a, b) => a - b);
  return [all, runs.map((run, i) => ({ label: label(run.id), values: all.map((x) => points[i].get(x) ?? null) }))];
}

function settings(data, label) {
  const columns = [
    { label: "Setting", cell: (row) => h("code", row.key) },
    ...data.runs.map((run) => ({
      label: label(run.id),
      cell: (row) => h("span.mono.break", settingText(row.values[run.id]) || NONE),
    })),
  ];
  const title = "Settings that differ";
  if (!data.settings.length) return tableCard(title, h("p.soft.table-title", "None."));
  return tableCard(title, table(columns, data.settings, { label: title }));
}

function evaluations(data, label) {
  const cells = data.runs.flatMap((run) =>
    ["before", "after"].flatMap((when) => {
      const rate = data.evaluations[run.id]?.[when];
      const name = `${label(run.id)}, ${when}`;
      return rate ? [h("span", name), interval(rate, name), rateText(rate)] : [];
    }),
  );
  return cells.length === 0
    ? null
    : h("section.card", h("h2", "Held-out pass rate with 95 % intervals"), h("div.rates", cells));
}

function paired(data, label) {
  if (!data.flips?.length)
    return notice("", "No two of these runs were evaluated on the same problems, so there is no paired test.");
  const columns = [
    { label: "A", cell: (row) => label(row.a) },
    { label: "B", cell: (row) => label(row.b) },
    { label: "Both", cell: (row) => integer(row.both), kind: "num" },
    { label: "Only A", cell: (row) => integer(row.only_a), kind: "num" },
    { label: "Only B", cell: (row) => integer(row.only_b), kind: "num" },
    { label: "Neither", cell: (row) => integer(row.neither), kind: "num" },
    { label: "McNemar p", cell: (row) => number(row.p_value), kind: "num" },
  ];
  const title = "Held-out problems solved after training, paired";
  return tableCard(title, table(columns, data.flips, { label: title }));
}
