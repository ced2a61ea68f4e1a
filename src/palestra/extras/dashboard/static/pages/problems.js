/* All problems of a run: which became solvable, which were lost again, which stay hard. */

import { empty, moreButton, select } from "../components/parts.js";
import { reading } from "../components/reading.js";
import { getRun, runHead } from "../components/run_head.js";
import { table, tableKeys } from "../components/table.js";
import { get, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { integer, percent, signKind } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { link, remember } from "../lib/router.js";
import { oneLine } from "../lib/text.js";

const SORTS = [
  ["flips", "Most flips first"],
  ["hardest", "Hardest first"],
  ["id", "By name"],
];

export async function show({ names: [id], query, signal }) {
  const run = await getRun(id, signal);
  const list = h("div.card.flush");
  let sort = query.get("sort") ?? "flips";
  let rows = [];
  const href = (row) => link(["runs", id, "problems", row.problem_id]);
  const columns = [
    {
      label: "Problem",
      cell: (row) => [
        h("a.break", { href: href(row) }, oneLine(row.question, 110) || row.problem_id),
        h("div.soft.small.mono", row.problem_id),
      ],
    },
    { label: "Attempts", cell: (row) => integer(row.attempts), kind: "num wide-only" },
    { label: "First", cell: (row) => percent(row.first_rate), kind: "num" },
    {
      label: "Last",
      cell: (row) => h(`span.${signKind(row.last_rate - row.first_rate)}`, percent(row.last_rate)),
      kind: "num",
    },
    { label: "Flips", cell: (row) => integer(row.flips), kind: "num" },
  ];
  const sampling = { label: "Sampling", cell: (row) => row.sampling ?? "", kind: "wide-only" };
  const load = async (cursor = null) => {
    const answer = await get(runPath(id, "problems"), { sort, limit: 50, cursor }, signal);
    rows = cursor ? [...rows, ...answer.problems] : answer.problems;
    const more = moreButton(answer.next, load);
    const shown = rows.some((row) => row.sampling) ? [...columns, sampling] : columns;
    replace(
      list,
      rows.length
        ? [table(shown, rows, { label: "Problems", href }), more]
        : empty("No problems yet", "They appear with the first step."),
    );
    return answer;
  };
  const { indexed } = await load();
  setKeys(tableKeys(list));
  const order = select("Order", SORTS, sort, (value) => {
    sort = value;
    remember({ sort });
    load();
  });
  return [
    runHead(run, "problems"),
    h(
      "div.filters",
      h(
        "p.soft.grow",
        "The same problem over training: a flip is where most attempts changed from failed to passed, or back.",
      ),
      order,
    ),
    reading(id, indexed, () => load(), signal),
    list,
  ];
}
