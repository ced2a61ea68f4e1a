/* The token view: every token of a rollout, coloured by one of its columns, with all its numbers on hover or by the
   arrow keys. Long rollouts are loaded in parts. */

import { get } from "../lib/api.js";
import { append, h, replace } from "../lib/dom.js";
import { exact, integer } from "../lib/format.js";
import { segmented } from "./parts.js";
import { COLUMNS, MAKER_COLOURS, MASK_COLOURS, scaleOf } from "./token_colours.js";

const PART = 3000; // tokens of one request
const NUMBERS = ["logprob", "learner_logprob", "advantage", "ratio", "entropy", "gap", "version"];

export class TokenView {
  constructor(path, { column = "maker", onColumn = () => {} } = {}) {
    this.path = path;
    this.column = column;
    this.onColumn = onColumn;
    this.spans = [];
    this.picked = -1;
    this.strip = h("div.tokens", {
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens: the arrow keys go from one to the next",
      onmousemove: (event) => this.#hover(event),
      onmouseleave: () => (this.tip.hidden = true),
      onkeydown: (event) => this.#key(event),
      onblur: () => (this.tip.hidden = true),
    });
    this.tip = h("div.token-tip", { hidden: true, role: "status" });
    this.bar = h("div.token-bar");
    this.more = h("button.fold", { type: "button", onclick: () => this.#load() });
    this.element = h("div.card", this.bar, this.strip, this.more, this.tip);
  }

  async open() {
    await this.#load();
    if (!this.data.known.includes(this.column) && NUMBERS.includes(this.column)) this.column = "maker";
    this.#drawBar();
    this.#colour(0);
    return this;
  }

  async #load() {
    const part = await get(this.path, { start: this.spans.length, limit: PART });
    if (!this.data) this.data = part;
    else
      for (const key of Object.keys(part))
        if (Array.isArray(part[key]) && key !== "known") this.data[key].push(...part[key]);
    const from = this.spans.length;
    const spans = part.text.map((text, i) => tokenSpan(text, from + i, part.mask[i]));
    this.spans.push(...spans);
    this.strip.append(...spans);
    const rest = part.total - this.spans.length;
    this.more.hidden = rest <= 0;
    this.more.textContent = `Show ${integer(Math.min(rest, PART))} of ${integer(rest)} more tokens`;
    this.#colour(from);
  }

  #drawBar() {
    const columns = Object.keys(COLUMNS).filter(
      (name) => ["maker", "mask"].includes(name) || this.data.known.includes(name),
    );
    const choose = (name) => {
      this.column = name;
      this.onColumn(name);
      this.#colour(0);
      replace(this.about, this.#about());
    };
    this.about = h("span.row", this.#about());
    replace(
      this.bar,
      segmented(
        "Colour by",
        columns.map((name) => [name, COLUMNS[name].label]),
        this.column,
        choose,
      ),
      this.about,
    );
  }

  #about() {
    const { help, worst } = COLUMNS[this.column];
    const place = this.data.worst?.[this.column];
    return [
      this.#legend(),
      worst &&
        place &&
        h(
          "button",
          { type: "button", "data-jump": "", onclick: () => this.jump(place.index) },
          `Jump to the worst (${exact(place.value)})`,
        ),
      h("span.soft.small", help),
    ];
  }

  #legend() {
    const swatches = {
      maker: Object.entries(MAKER_COLOURS),
      mask: [
        ["trained", MASK_COLOURS.true],
        ["not trained", MASK_COLOURS.false],
      ],
    }[this.column];
    if (swatches)
      return h(
        "span.legend",
        swatches.map(([name, css]) => h("span", h("span.swatch", { style: { background: css } }), name)),
      );
    const { ends, css } = this.#scale();
    return h("span.scale", ends[0], h("i", { style: { background: css } }), ends[1]);
  }

  #scale() {
    return scaleOf(this.column, this.data.range?.[this.column] ?? [0, 1]);
  }

  #colour(from) {
    const values = this.data[this.column];
    const pick =
      { maker: (value) => MAKER_COLOURS[value], mask: (value) => MASK_COLOURS[value] }[this.column] ??
      this.#scale().style;
    for (let i = from; i < this.spans.length; i++) this.spans[i].style.background = pick(values[i]) || "";
  }

  /** Show the token at `index`, with its numbers. */
  async jump(index) {
    while (index >= this.spans.length && this.spans.length < this.data.total) await this.#load();
    this.spans[index].scrollIntoView({ block: "center" });
    this.strip.focus({ preventScroll: true });
    this.#pick(index);
  }

  #hover(event) {
    const span = event.target.closest(".token");
    if (span) this.#pick(Number(span.dataset.index));
  }

  #key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    this.#pick(Math.max(0, Math.min(this.spans.length - 1, this.picked + by)));
    this.spans[this.picked].scrollIntoView({ block: "nearest" });
  }

  #pick(index) {
    this.spans[this.picked]?.classList.remove("picked");
    this.picked = index;
    const span = this.spans[index];
    span.classList.add("picked");
    const { data } = this;
    const rows = NUMBERS.filter((name) => data[name] && data[name][index] !== null).map((name) => [
      name.replace("_", " "),
      exact(data[name][index]),
    ]);
    const all = [
      ["maker", data.maker[index]],
      ["trained", data.mask[index] ? "yes" : "no"],
      ["turn", data.turn[index]],
      ["id", data.ids[index]],
      ...rows,
    ];
    replace(
      this.tip,
      h("b.mono", JSON.stringify(data.text[index])),
      h("span.soft", ` token ${integer(index)}`),
      h(
        "dl",
        all.map(([key, value]) => [h("dt", key), h("dd", value)]),
      ),
    );
    this.tip.hidden = false;
    const box = span.getClientRects()[0];
    const below = box.bottom + 10 + this.tip.offsetHeight < innerHeight;
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - this.tip.offsetWidth - 12))}px`;
    this.tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - this.tip.offsetHeight - 8)}px`;
  }
}

export function tokenSpan(text, index, isTrained) {
  const span = h(`span.token${isTrained ? "" : ".masked"}`, { "data-index": index });
  const parts = text.split("\n");
  parts.forEach((part, i) => {
    append(span, part);
    if (i < parts.length - 1) span.append(h("span.glyph", "⏎"), "\n");
  });
  if (!text) span.append(h("span.glyph", "∅"));
  return span;
}
