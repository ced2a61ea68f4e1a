/* Characters that a reader does not see, or that change how others are shown, drawn as their code points: a right-to-left
   override could otherwise disguise what a model said. `h` applies it to every text. */

// C0 without tab and newline, DEL and C1, soft hyphen, zero-width and bidi marks, line separators, invisible
// operators, annotations, tags, and surrogates that stand alone; a run of the same one is one mark.
export const HIDDEN =
  /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|\p{Surrogate})\1*/gu;
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

/** The text as strings and elements. */
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

function mark(run) {
  const character = String.fromCodePoint(run.codePointAt(0));
  const count = run.length / character.length;
  const code = run.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  const element = document.createElement("span");
  element.className = "hidden-char";
  element.title = `U+${code}`;
  element.textContent = (NAMES[character] ?? code) + (count > 1 ? ` × ${count}` : "");
  return element;
}
