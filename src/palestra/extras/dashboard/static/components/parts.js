/* Small pieces that many pages use: states, figures, notices, choices. */

import { h } from "../lib/dom.js";
import { icon } from "./icons.js";

const STATUS_KIND = {
  running: "good.live",
  starting: "warn.live",
  pending: "warn",
  stopping: "warn.live",
  completed: "",
  failed: "bad",
  stopped: "warn",
};

export const statusPill = (status) => h(`span.pill${dotted(STATUS_KIND[status])}`, status);

/** "passed", "failed", or neither. */
export function passedPill(passed) {
  if (passed === null || passed === undefined) return h("span.pill", "no verdict");
  return passed ? h("span.pill.good", "passed") : h("span.pill.bad", "failed");
}

/** A problem that changed sides. */
export const flipPill = (direction) =>
  direction === "fixed" ? h("span.pill.good", "now solved") : h("span.pill.bad", "lost again");

const stat = (label, value) => h("div.stat", h("b", value), h("span", label));

export const stats = (pairs) =>
  h(
    "div.stats",
    pairs.filter(([, value]) => value !== undefined).map((pair) => stat(...pair)),
  );

export const facts = (pairs) =>
  h(
    "dl.facts",
    pairs.map(([key, value]) => [h("dt", key), h("dd", value)]),
  );

export const notice = (kind, ...children) =>
  h(`div.notice${dotted(kind)}`, icon(kind === "good" ? "check" : kind ? "warning" : "info"), h("div", ...children));

export const empty = (title, ...children) => h("div.empty", h("h2", title), h("p", ...children));

/** Gets the next part of a list, where there is one. */
export const moreButton = (cursor, load) =>
  cursor && h("div.more", h("button", { type: "button", onclick: () => load(cursor) }, "Show more"));

export const loading = (what = "Loading …") => h("p.loading", what);

export const progress = (share, label) =>
  h(
    "div.progress",
    {
      role: "progressbar",
      "aria-label": label,
      "aria-valuenow": Math.round(100 * share),
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    },
    h("i", { style: { width: `${Math.min(100, 100 * share)}%` } }),
  );

/** One of a few values: [[value, label], …]; `choose` is called with the value. */
export function segmented(label, options, current, choose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === current), onclick: () => pick(value) }, text),
  );
  const pick = (value) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
    choose(value);
  };
  return h("div.segmented", { role: "group", "aria-label": label }, buttons);
}

/** A field to search in; `changed` is called with its text as one types. */
export function searchBox(label, changed, { value = "", placeholder = label } = {}) {
  const input = h("input.grow", { type: "search", placeholder, "aria-label": label, value });
  input.addEventListener("input", () => changed(input.value));
  return input;
}

/** A drop-down list: [[value, label], …]. */
export function select(label, options, current, choose) {
  const element = h(
    "select",
    { "aria-label": label, onchange: () => choose(element.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(current) }, text)),
  );
  return element;
}

/** The head of a page: where it is, its title, a sentence, and what can be done. */
export function pageHead(title, { crumbs = [], lead = null, actions = [] } = {}) {
  document.title = `${title} · Palestra`;
  const path = crumbs.flatMap(([label, href], i) => [i ? " / " : "", h("a", { href }, label)]);
  return h(
    "div.page-head",
    h(
      "div",
      path.length ? h("nav.crumbs", { "aria-label": "Breadcrumb" }, path) : null,
      h("h1.break", title),
      lead && h("div.lead", lead),
    ),
    actions.length ? h("div.actions", actions) : null,
  );
}

const dotted = (kind) => (kind ? `.${kind}` : "");
