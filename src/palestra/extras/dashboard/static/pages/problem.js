/* One problem over training: what was said at each visit, and where the outcome flipped. */

import { facts, flipPill } from "../components/parts.js";
import { rolloutLink } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { number, percent, when } from "../lib/format.js";
import { link } from "../lib/router.js";
import { textBlock } from "../lib/text.js";

export async function show({ names: [id, problem], query, signal }) {
  const kind = query.get("kind"); // which of two problems of one id: that of training, or that of the evaluations
  const [run, data] = await Promise.all([
    getRun(id, signal),
    get(runPath(id, "problem"), { id: problem, kind }, signal),
  ]);
  return [
    runHead(run, "problems"),
    h(
      "div.stack",
      h(
        "section.card",
        h(
          "div.card-head",
          h("h2.break", data.problem_id),
          h("a", { href: link(["runs", id, "rollouts"], { problem: data.problem_id, kind }) }, "All its rollouts"),
        ),
        textBlock(data.question ?? "", { foldAt: 2000 }),
      ),
      data.visits.map((visit) => visitCard(id, visit)),
    ),
  ];
}

function visitCard(id, visit) {
  const best = visit.rollouts[0];
  return h(
    "section.card",
    h(
      "div.row.between.bar",
      h("div.row", h("h2", when(visit.kind, visit.step)), visit.flip && flipPill(visit.flip)),
      visit.rollouts.length > 1 ? h("a", { href: link(["runs", id, "groups", visit.group]) }, "Side by side") : null,
    ),
    h(
      "div.attempts.bar",
      visit.rollouts.map((rollout, i) =>
        h(
          `a.${rollout.passed ? "good" : "bad"}`,
          { href: rolloutLink(id, rollout), "aria-label": `Attempt ${i + 1}: ${rollout.passed ? "passed" : "failed"}` },
          rollout.passed ? "✓" : "✗",
        ),
      ),
    ),
    facts([
      ["Passed", percent(visit.pass_rate)],
      ["Mean reward", number(visit.reward_mean)],
      ["It said", textBlock(best?.answer || "no answer", { foldAt: 600 })],
    ]),
  );
}
