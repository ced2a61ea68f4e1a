/* A rate with its 95 % interval, drawn on 0 to 100 %. */

import { h, svg } from "../lib/dom.js";
import { percent } from "../lib/format.js";

export function interval(rate, label = "") {
  const x = (share) => `${(100 * share).toFixed(2)}%`;
  const name = `${label} ${percent(rate.rate, 1)}, between ${percent(rate.low, 1)} and ${percent(rate.high, 1)}, ${rate.passed} of ${rate.n}`;
  return svg(
    "svg",
    { class: "interval", role: "img", "aria-label": name },
    svg("line", {
      x1: "0%",
      x2: "100%",
      y1: 8,
      y2: 8,
      stroke: "var(--track)",
      "stroke-width": 6,
      "stroke-linecap": "round",
    }),
    svg("line", {
      x1: x(rate.low),
      x2: x(rate.high),
      y1: 8,
      y2: 8,
      stroke: "var(--accent)",
      "stroke-width": 6,
      "stroke-linecap": "round",
      opacity: 0.35,
    }),
    svg("circle", { cx: x(rate.rate), cy: 8, r: 5, fill: "var(--accent)" }),
  );
}

export const rateText = (rate) =>
  rate
    ? h(
        "span",
        h("b", percent(rate.rate, 1)),
        h("span.soft.small.wide-only", ` ${percent(rate.low)} – ${percent(rate.high)}`),
      )
    : "–";
