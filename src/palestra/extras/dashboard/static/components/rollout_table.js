/* Rollouts as rows: what was asked, what came of it, and the numbers to sort them by. */

import { h } from "../lib/dom.js";
import { integer, neighbours, number, signed, signKind } from "../lib/format.js";
import { link } from "../lib/router.js";
import { oneLine } from "../lib/text.js";
import { passedPill } from "./parts.js";
import { table } from "./table.js";

export const rolloutLink = (run, row, parameters) => link(["runs", run, "rollouts", row.id], parameters);

/** `brief`: without the columns that are for sorting, where others need the room. `grouped`: attempts at one problem
 * that follow each other share a heading with the problem. */
export function rolloutTable(run, rows, { label = "Rollouts", extra = [], brief = false, grouped = false } = {}) {
  const groups = new Map((grouped ? neighbours(rows) : []).filter((g) => g.length > 1).map((g) => [g[0], g]));
  const inGroup = new Set([...groups.values()].flat());
  const heading = (row) => groups.has(row) && groupHeading(run, groups.get(row));
  const numbers = [
    { label: "Ended", cell: ended, kind: "wide-only" },
    { label: "Tools", cell: (row) => integer(row.tool_calls), kind: "num wide-only" },
    { label: "Tokens", cell: (row) => integer(row.sampled_tokens), kind: "num wide-only" },
  ];
  const columns = [
    { label: "Step", cell: (row) => (row.kind === "train" ? row.step : row.kind) },
    { label: "Rollout", cell: (row) => what(run, row, inGroup.has(row)) },
    { label: "Reward", cell: (row) => number(row.reward), kind: "num" },
    { label: "Advantage", cell: advantage, kind: "num wide-only" },
    { label: "Verdict", cell: (row) => passedPill(row.passed) },
    ...(brief ? [] : numbers),
    ...extra,
  ];
  return table(columns, rows, { label, heading, href: (row) => rolloutLink(run, row) });
}

function groupHeading(run, rows) {
  const mean = rows.reduce((sum, row) => sum + row.reward, 0) / rows.length;
  return [
    title(rows[0]),
    h("span.soft.small", ` · ${rows.length} attempts, mean reward ${number(mean)} · `),
    h("a.small.underlined", { href: link(["runs", run, "groups", rows[0].group]) }, "side by side"),
  ];
}

const title = (row) => oneLine(row.question, 110) || row.problem_id;
const advantage = (row) => h(`span.${signKind(row.advantage)}`, signed(row.advantage));

function what(run, row, inGroup) {
  const snippet = row.snippet?.map(([text, isMatch]) => (isMatch ? h("mark", text) : text));
  return [
    h("a.break", { href: rolloutLink(run, row) }, inGroup ? `Rollout ${row.id}` : title(row)),
    h("div.soft.small.break", snippet ? [snippet] : oneLine(row.answer ?? "", 120) || "no answer"),
  ];
}

function ended(row) {
  if (row.error) return h("span.pill.bad", { title: oneLine(row.error, 300) }, "error");
  return h(`span.pill${row.stop === "answered" ? "" : ".warn"}`, row.stop);
}
