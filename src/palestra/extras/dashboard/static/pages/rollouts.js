/* The rollouts of a run: filter, sort, and search their full text. */

import { empty, moreButton, searchBox, select } from "../components/parts.js";
import { reading } from "../components/reading.js";
import { rolloutTable } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { tableKeys } from "../components/table.js";
import { get, runPath } from "../lib/api.js";
import { debounce, h, replace } from "../lib/dom.js";
import { integer, kindName, plural } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { remember } from "../lib/router.js";

const PAGE = 50;
const SORTS = [
  ["newest", "Newest first"],
  ["oldest", "Oldest first"],
  ["-reward", "Highest reward"],
  ["reward", "Lowest reward"],
  ["-advantage", "Highest advantage"],
  ["advantage", "Lowest advantage"],
  ["-tokens", "Longest"],
  ["tokens", "Shortest"],
];
const NAMES = [
  "kind",
  "step",
  "problem",
  "stop",
  "tool",
  "passed",
  "error",
  "measure",
  "measure_passed",
  "reward_min",
  "reward_max",
  "q",
  "sort",
];

export async function show({ names: [id], query, signal }) {
  const [run, facets] = await Promise.all([getRun(id, signal), get(runPath(id, "facets"), {}, signal)]);
  const filter = Object.fromEntries(NAMES.map((name) => [name, query.get(name) ?? ""]));
  const list = h("div.card.flush");
  const count = h("span.soft.small", { role: "status" });
  let rows = [];
  let latest = 0; // answers of older requests are dropped

  const load = async (cursor = null) => {
    const number = ++latest;
    const answer = await get(runPath(id, "rollouts"), { ...filter, limit: PAGE, cursor }, signal);
    if (number !== latest) return;
    rows = cursor ? [...rows, ...answer.rollouts] : answer.rollouts;
    count.textContent = plural(answer.count, "rollout");
    const more = moreButton(answer.next, load);
    replace(list, rows.length ? [rolloutTable(id, rows, { grouped: true }), more] : empty("No rollout matches", "Loosen a filter."));
  };
  const set = (name, delay = 0) =>
    debounce((value) => {
      filter[name] = value;
      remember({ [name]: value });
      load();
    }, delay);
  const search = searchBox("Full-text search", set("q", 250), {
    value: filter.q,
    placeholder: 'Search all text: words, "a phrase", begin*',
  });

  const choices = h("div.filters", filters(facets, filter, set));
  const onMore = async (more) => {
    if (rows.length <= PAGE) await load();
    replace(choices, filters(more, filter, set));
  };
  const order = select("Order", SORTS, filter.sort || "newest", set("sort"));

  await load();
  setKeys({ "/": ["Search", () => search.focus()], ...tableKeys(list) });
  return [
    runHead(run, "rollouts"),
    h("div.filters", search, order, count),
    choices,
    reading(id, facets.indexed, onMore, signal),
    list,
  ];
}

function filters(facets, filter, set) {
  const choice = (label, name, options) => select(label, [["", label], ...options], filter[name], set(name));
  const counted = (found) =>
    Object.entries(found ?? {})
      .filter(([name]) => name)
      .map(([name, n]) => [name, `${name} (${integer(n)})`]);
  const box = (name, label, width) =>
    h("input", {
      type: "number",
      placeholder: label,
      "aria-label": label,
      value: filter[name],
      style: { width },
      step: "any",
      oninput: (
        (apply) => (event) =>
          apply(event.target.value)
      )(set(name, 300)),
    });
  const kinds = Object.entries(facets.kinds).map(([name, n]) => [name, `${kindName(name)} (${integer(n)})`]);
  return [
    select("Which rollouts", kinds, filter.kind || "train", set("kind")),
    box("step", facets.steps?.length ? `Step ${facets.steps[0]}–${facets.steps.at(-1)}` : "Step", "112px"),
    choice("Any verdict", "passed", [
      ["1", "passed"],
      ["0", "failed"],
    ]),
    choice("Any end", "stop", counted(facets.stops)),
    choice("Any tool", "tool", counted(facets.tools)),
    facets.errors
      ? choice("With or without error", "error", [
          ["1", `with error (${integer(facets.errors)})`],
          ["0", "without error"],
        ])
      : null,
    facets.measures?.length > 1
      ? choice(
          "Any measure",
          "measure",
          facets.measures.map((name) => [name, name]),
        )
      : null,
    facets.measures?.length > 1
      ? choice("Its verdict", "measure_passed", [
          ["1", "measure passed"],
          ["0", "measure failed"],
        ])
      : null,
    h("span.row.nowrap", box("reward_min", "Reward from", "134px"), box("reward_max", "to", "70px")),
    filter.problem && chip("problem", filter.problem, set),
  ];
}

function chip(name, value, set) {
  const element = h(
    "button.pill",
    { type: "button", title: "Remove this filter", onclick: () => (set(name)(""), element.remove()) },
    `${name}: ${value} ×`,
  );
  return element;
}
