/* Text of any length: folded where it is long, cut where there is room for one line. */

import { append, h } from "./dom.js";
import { bytes } from "./format.js";
import { HIDDEN } from "./hidden.js";

const FOLD_AT = 6000; // characters; more is behind a button
const CHUNK = 200_000; // of a 10 MB message, what one press of the button adds: the page stays quick

/** The text in one line without hidden characters, for titles and table cells. */
export function oneLine(text, most = 160) {
  const line = String(text)
    .slice(0, 4 * most)
    .replace(HIDDEN, "·")
    .replace(/\s+/g, " ")
    .trim();
  return line.length > most ? line.slice(0, most - 1) + "…" : line;
}

/** A name or a path that may be broken behind its parts: reasoning_gym/<wbr>base_<wbr>conversion. */
export const breakable = (name) => name.split(/(?<=[/_.-])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

/** A block of text of any length. `load(start)` gets what the server left out, `whole` characters in all. */
export function textBlock(text, { tag = "div", whole = 0, load = null, foldAt = FOLD_AT } = {}) {
  const block = h(`${tag}.text`);
  if (text.length <= foldAt && !load) {
    return append(block, text);
  }
  let at = 0; // in `text`, of which everything before is shown
  let loaded = Array.from(text).length; // in characters, as the server counts: JavaScript counts UTF-16 units
  const show = (count) => {
    const end = Math.min(text.length, wholeCharacter(text, at + count));
    block.insertBefore(h("span", text.slice(at, end)), button);
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

/** A cut that does not split a surrogate pair. */
function wholeCharacter(text, index) {
  const unit = text.charCodeAt(index - 1);
  return unit >= 0xd800 && unit < 0xdc00 ? index + 1 : index;
}
