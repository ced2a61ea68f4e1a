/* All runs, live: search, start. */

import { icon } from "../components/icons.js";
import { empty, moreButton, pageHead, progress, searchBox, select, statusPill } from "../components/parts.js";
import { sparkline } from "../components/sparkline.js";
import { table, tableKeys } from "../components/table.js";
import { follow, get } from "../lib/api.js";
import { debounce, h, replace } from "../lib/dom.js";
import { ago, duration, moment, number, passRate, plural } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { link, remember } from "../lib/router.js";
import { status } from "../lib/status.js";
import { oneLine } from "../lib/text.js";

const STATES = ["running", "pending", "stopped", "completed", "failed"];

export async function show({ query, signal }) {
  const filter = { q: query.get("q") ?? "", state: query.get("state") ?? "" };
  const list = h("div.card.flush");
  const server = await status();
  let runs = [];
  let next = null;
  let total = 0;

  const draw = () => {
    const more = moreButton(next, load);
    replace(
      list,
      runs.length
        ? [table(COLUMNS, runs, { label: "Runs", href: (run) => link(["runs", run.id]) }), more]
        : nothing(filter, server),
    );
    count.textContent = plural(total, "run");
  };
  const load = async (cursor = null) => {
    const answer = await get("runs", { ...filter, cursor }, signal);
    runs = cursor ? [...runs, ...answer.runs] : answer.runs;
    ({ next, total } = answer);
    draw();
  };
  const changed = debounce(() => {
    remember(filter);
    load();
  }, 200);
  const count = h("span.soft.small");
  const search = searchBox("Search runs", (text) => ((filter.q = text), changed()), {
    value: filter.q,
    placeholder: "Search by name, environment or model",
  });
  const states = select(
    "State",
    [["", "All states"], ...STATES.map((state) => [state, state])],
    filter.state,
    (value) => ((filter.state = value), changed()),
  );

  await load();
  // Only an unfiltered first page is what the events tell; with a filter, a change means to ask again. Rows that are
  // as they were stay: a row that is replaced under the mouse swallows the click.
  const changedBy = (data) => {
    if (filter.q || filter.state || runs.length > data.runs.length) return load();
    if (JSON.stringify(data.runs) === JSON.stringify(runs)) return null;
    ({ runs, total } = data);
    return draw();
  };
  follow("runs/events", { runs: changedBy }, signal);
  setKeys({ "/": ["Search", () => search.focus()], ...tableKeys(list) });
  const start = server.can_start && h("a.button.primary", { href: link(["start"]) }, icon("plus"), "New run");
  return [
    pageHead("Runs", { lead: "Everything that was trained here, newest first.", actions: start ? [start] : [] }),
    h("div.filters", search, states, count),
    list,
  ];
}

const COLUMNS = [
  {
    label: "Run",
    cell: (run) => [
      h("a", { href: link(["runs", run.id]) }, h("b", run.name)),
      h("div.soft.small", [run.environment, run.model].filter(Boolean).join(" · ")),
    ],
  },
  {
    label: "State",
    cell: (run) => [
      h("div.row", statusPill(run.state)),
      run.reason && h("div.bad.small.break.run-reason", { title: run.reason }, oneLine(run.reason, 140)),
    ],
  },
  { label: "Progress", cell: runProgress, kind: "wide-only" },
  {
    label: "Reward",
    cell: (run) => h("div.row.nowrap", sparkline(run.sparkline ?? []), h("span.tabular", number(run.reward_mean))),
  },
  { label: "Pass rate", cell: rateCell, kind: "num wide-only" },
  {
    label: "Started",
    cell: (run) => h("span.soft.nowrap", { title: moment(run.created) }, ago(run.created)),
    kind: "wide-only",
  },
];

function rateCell(run) {
  const [rate, label] = passRate(run);
  return [rate, h("div.soft.small.nowrap", label)];
}

function runProgress(run) {
  if (!run.total_steps) return h("span.soft", run.step ? `step ${run.step}` : "");
  const left = run.active && run.seconds_left ? ` · ${duration(run.seconds_left)} left` : "";
  return [
    progress(run.step / run.total_steps, `Progress of ${run.name}`),
    h("div.soft.small.nowrap", `${run.step} of ${run.total_steps} steps${left}`),
  ];
}

function nothing(filter, server) {
  if (filter.q || filter.state) return empty("No run matches", "Change the search or the state.");
  if (!server.can_start) return empty("No runs here", h("code", server.path ?? server.home));
  return empty("No runs yet", "Start one here, or in a terminal with ", h("code", "palestra train"), ".");
}
