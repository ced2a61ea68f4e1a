/* A curve of a few pixels: where it goes, without axes. */

import { h, svg } from "../lib/dom.js";
import { number } from "../lib/format.js";

const WIDTH = 96;
const HEIGHT = 26;

export function sparkline(values) {
  const points = values.filter((value) => Number.isFinite(value));
  if (points.length < 2) return h("span");
  const low = Math.min(...points);
  const span = Math.max(...points) - low || 1;
  const x = (i) => (i * WIDTH) / (points.length - 1);
  const y = (value) => HEIGHT - 3 - ((value - low) / span) * (HEIGHT - 6);
  const path = points.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const name = `reward: ${number(points[0])} at first, now ${number(points.at(-1))}`;
  return svg(
    "svg",
    { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name },
    svg("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 1.8, "stroke-linejoin": "round" }),
    svg("circle", { cx: x(points.length - 1), cy: y(points.at(-1)), r: 2.4, fill: "var(--accent)" }),
  );
}
