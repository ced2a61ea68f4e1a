/* One environment: its docs, and a test that samples a few attempts. */

import { runJob } from "../components/job.js";
import { facts, notice, pageHead, stats } from "../components/parts.js";
import { table } from "../components/table.js";
import { get, send } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { duration, integer, number, percent } from "../lib/format.js";
import { link } from "../lib/router.js";
import { status } from "../lib/status.js";
import { breakable, textBlock } from "../lib/text.js";

export async function show({ names: [name], signal }) {
  const [environment, server] = await Promise.all([get("environment", { name }, signal), status()]);
  const place = h("div", { "aria-live": "polite" });
  const model = h("input", { id: "model", value: server.default_model, spellcheck: "false" });
  const test = (event) => {
    event.preventDefault();
    const body = { environment: name, values: {}, models: [model.value], num_steps: 2, group_size: 4 };
    runJob(place, () => send("environments/test", body), outcome, signal);
  };
  const tester = h(
    "form.card.stack",
    { onsubmit: test },
    h("h2", "Try it"),
    h("p.soft.small", "Two problems with four attempts each, sampled now and scored."),
    h("div.field", h("label", { for: "model" }, "Model"), model),
    h("div", h("button.primary", { type: "submit" }, "Test")),
    place,
  );
  return [
    pageHead(environment.name, {
      crumbs: [["Environments", link(["environments"])]],
      lead: environment.description,
      actions: server.can_start
        ? [h("a.button.primary", { href: link(["start"], { environment: name }) }, "Train in it")]
        : [],
    }),
    h(
      "div.columns",
      h(
        "section.card",
        h("h2", "Docs"),
        environment.docs ? h("div.docs", textBlock(environment.docs)) : h("p.soft", "It has none."),
      ),
      h(
        "div.stack",
        tester,
        h(
          "section.card",
          h("h2", "About"),
          facts([
            ["Origin", environment.origin],
            ["Dialect", environment.dialect],
            ["File", h("span.mono.small", breakable(environment.file ?? "–"))],
          ]),
        ),
      ),
    ),
  ];
}

function outcome({ results }) {
  const columns = [
    { label: "Problem", cell: (row) => row.step, kind: "num" },
    { label: "Correct", cell: (row) => `${integer(row.correct)} of ${integer(row.completions)}`, kind: "num" },
    { label: "Scores", cell: (row) => h("span.small.mono", (row.scores ?? []).map(number).join("  ")) },
  ];
  return results.map((result) =>
    result.error
      ? notice("bad", textBlock(result.error))
      : h(
          "div.stack",
          stats([
            ["correct", percent(result.accuracy)],
            ["mean score", number(result.mean_score)],
            ["took", duration(result.seconds)],
          ]),
          table(columns, result.steps ?? [], { label: `Attempts of ${result.model}` }),
        ),
  );
}
