/* What each measure said of a rollout, and why. */

import { h } from "../lib/dom.js";
import { number } from "../lib/format.js";
import { textBlock } from "../lib/text.js";
import { passedPill } from "./parts.js";

export function verdicts(scores, measures = []) {
  const weight = new Map(measures.map((measure) => [measure.name, measure]));
  return h(
    "div.verdicts",
    Object.entries(scores).map(([name, score]) => {
      const isCheckMetric = weight.get(name)?.rewarded === false;
      return h(
        "div.verdict",
        h("span.break", h("b", name), isCheckMetric && [" ", h("span.pill", "check metric")]),
        h("span.row", h("span.tabular", number(score.value)), verdictPill(score)),
        score.reason && h("div.reason", textBlock(score.reason, { foldAt: 1200 })),
      );
    }),
  );
}

export function verdictPill(score) {
  return score.error ? h("span.pill.warn", "measure failed") : passedPill(score.passed);
}
