/* Line icons of 24 × 24, drawn with the text's colour. */

import { svg } from "../lib/dom.js";

const PATHS = {
  brand: "M3 21h18M4 8.5 12 3l8 5.5M6 21V10M12 21v-6M18 21V10",
  lock: "M7 11V8a5 5 0 0 1 10 0v3M6 11h12v9H6z",
  warning: "M12 4 2.8 20h18.4L12 4ZM12 10v4.5M12 17.4v.1",
  info: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18ZM12 11v5M12 7.6v.1",
  check: "M5 12.5 10 17.5 19 7",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5Z",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8ZM12 2v2M12 20v2M4 12H2M22 12h-2M5.6 5.6 4.2 4.2M19.8 19.8l-1.4-1.4M5.6 18.4l-1.4 1.4M19.8 4.2l-1.4 1.4",
  auto: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18ZM12 3v18M12 7l5.5-1M12 12h9M12 17l5.5 1",
  help: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18ZM9.3 9.3a2.8 2.8 0 1 1 3.9 2.6c-.8.4-1.2 1-1.2 2M12 16.9v.1",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  plus: "M12 5v14M5 12h14",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
};

export function icon(name, size = 16) {
  const attributes = {
    viewBox: "0 0 24 24",
    width: size,
    height: size,
    fill: "none",
    stroke: "currentColor",
    "stroke-width": 2,
    "stroke-linecap": "round",
    "stroke-linejoin": "round",
    "aria-hidden": "true",
  };
  return svg("svg", attributes, svg("path", { d: PATHS[name] }));
}
