/* What a model or a tool wrote, made visible: control, bidi and zero-width characters are drawn as their code points
   (a right-to-left override could otherwise disguise what was said), and very long text is folded. */

import { h } from "./dom.js";
import { bytes } from "./format.js";

// C0 without tab and newline, DEL and C1, soft hyphen, zero-width and bidi marks, line separators, invisible
// operators, variation selectors' neighbours U+FFF9-FFFB, tags, and surrogates that stand alone.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;
const NAMES = {
  "\u001b": "ESC",
  "\u0000": "NUL",
  "\r": "CR",
  "\b": "BS",
  "\u0007": "BEL",
  "\u00ad": "SHY",
  "\u200b": "ZWSP",
  "\u200d": "ZWJ",
  "\u202e": "RLO",
  "\u202d": "LRO",
  "\ufeff": "BOM",
};

export const FOLD_AT = 6000; // characters; more is behind a button
const CHUNK = 200_000; // of a 10 MB message, what one press of the button adds: the page stays quick

/** The text as nodes. */
export function visible(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(mark(match[0]));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** The text in one line without hidden characters, for titles and table cells. */
export function oneLine(text, most = 160) {
  const line = String(text)
    .slice(0, 4 * most)
    .replace(HIDDEN, "·")
    .replace(/\s+/g, " ")
    .trim();
  return line.length > most ? line.slice(0, most - 1) + "…" : line;
}

/** A block of text of any length. `load(start)` gets what the server left out, `whole` characters in all. */
export function textBlock(text, { tag = "div", whole = 0, load = null, foldAt = FOLD_AT } = {}) {
  const block = h(`${tag}.text`);
  if (text.length <= foldAt && !load) {
    block.append(...visible(text));
    return block;
  }
  let at = 0; // in `text`, of which everything before is shown
  let loaded = Array.from(text).length; // in characters, as the server counts: JavaScript counts UTF-16 units
  const show = (count) => {
    const end = Math.min(text.length, wholeCharacter(text, at + count));
    block.insertBefore(h("span", ...visible(text.slice(at, end))), button);
    at = end;
    const rest = text.length - at + Math.max(0, whole - loaded);
    button.textContent = `Show ${rest > CHUNK ? bytes(CHUNK) + " more of " : "the remaining "}${bytes(rest)}`;
    if (!rest) button.remove();
  };
  const more = async () => {
    button.disabled = true;
    if (at === text.length && load) {
      text = await load(loaded);
      loaded = text ? loaded + Array.from(text).length : whole;
      at = 0;
    }
    show(CHUNK);
    button.disabled = false;
  };
  const button = h("button.fold", { type: "button", onclick: more });
  block.append(button);
  show(foldAt / 3);
  return block;
}

function mark(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return h("span.hidden-char", { title: `U+${code}` }, NAMES[character] ?? code);
}

/** A cut that does not split a surrogate pair. */
function wholeCharacter(text, index) {
  const unit = text.charCodeAt(index - 1);
  return unit >= 0xd800 && unit < 0xdc00 ? index + 1 : index;
}
