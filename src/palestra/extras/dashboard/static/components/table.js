/* A table whose rows open something. Rows are reached by j and k or the arrow keys, and opened by Enter. */

import { h } from "../lib/dom.js";

/** columns: [{label, cell(row), kind}], kind being a class like "num" or "wide-only"; `heading(row)` goes above a row. */
export function table(columns, rows, { href = null, label, heading = () => null } = {}) {
  const head = h(
    "tr",
    columns.map(({ label, kind = "" }) => h("th", { class: kind || null, scope: "col" }, label)),
  );
  const body = rows.map((row) => {
    const target = href?.(row);
    const cells = columns.map(({ cell, kind = "" }) => h("td", { class: kind || null }, cell(row)));
    const open = (event) => {
      if (!event.target.closest("a, button, input, label")) location.hash = target;
    };
    const above = heading(row);
    const line = h(`tr${target ? ".open" : ""}`, target ? { onclick: open, "data-href": target } : {}, cells);
    return above ? [h("tr.heading", h("th", { colspan: columns.length, scope: "rowgroup" }, above)), line] : line;
  });
  const element = h("table", h("caption.visually-hidden", label), h("thead", head), h("tbody", body));
  return h("div.scroll-x", { tabindex: 0, role: "region", "aria-label": label }, element);
}

/** A card around a table, with its title. */
export const tableCard = (title, ...content) =>
  h("section.card.flush", h("div.table-title", typeof title === "string" ? h("h2", title) : title), content);

/** j, k and o for the table in `container`. */
export function tableKeys(container) {
  let at = -1;
  const rows = () => [...container.querySelectorAll("tr.open")];
  const move = (by) => {
    const all = rows();
    if (!all.length) return;
    at = Math.max(0, Math.min(all.length - 1, at + by));
    all.forEach((row, i) => row.toggleAttribute("data-picked", i === at));
    all[at].scrollIntoView({ block: "nearest" });
  };
  const open = () => {
    const row = rows()[at];
    if (row) location.hash = row.dataset.href;
  };
  return { j: ["Next row", () => move(1)], k: ["Row before", () => move(-1)], o: ["Open the row", open] };
}
