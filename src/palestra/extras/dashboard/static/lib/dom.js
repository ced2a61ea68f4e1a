/* Elements without markup: strings become text nodes with hidden characters made visible, so nothing that a model wrote
   is ever parsed as HTML. */

import { visible } from "./hidden.js";

/** h("button.primary", {onclick, "aria-label": "…"}, "Save", icon) → an element. `null` and `false` children are left out. */
export function h(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  if (attributes !== undefined && !isAttributes(attributes)) children.unshift(attributes);
  else setAttributes(element, attributes ?? {});
  append(element, children);
  return element;
}

/** An SVG element; its attributes are numbers and fixed words, never text of others. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) element.append(child);
    else for (const part of visible(String(child))) element.append(part);
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** Calls `action` once `delay` ms have passed without another call. */
export function debounce(action, delay = 250) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay);
  };
}

function isAttributes(value) {
  return value === null || (typeof value === "object" && !(value instanceof Node) && !Array.isArray(value));
}

function setAttributes(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.entries(value).forEach(([name, v]) => element.style.setProperty(name, v));
    else if (key === "value" || key === "checked" || key === "disabled" || key === "selected") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
}
