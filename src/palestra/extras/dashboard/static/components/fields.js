/* The fields of the start form: one input for each setting, by its kind; locked ones are shown, and cannot be changed. */

import { h } from "../lib/dom.js";
import { settingText } from "../lib/format.js";
import { icon } from "./icons.js";

/** {element, name, value() → what to send or undefined if unchanged, error(text)}. */
export function field(setting, onInput) {
  const id = `field-${setting.name}`;
  const input = inputOf(setting, id, onInput);
  const problem = h("div.error", { role: "alert", id: `${id}-error` });
  const element = h(
    "div.field",
    { "data-name": setting.name },
    h("label", { for: id }, setting.name),
    input,
    setting.description ? h("div.hint", { id: `${id}-hint` }, setting.description) : null,
    problem,
  );
  input.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
  const read = () => (setting.kind === "boolean" ? input.checked : input.value);
  const start = read();
  return {
    element,
    name: setting.name,
    value: () => (read() === start ? undefined : read()),
    error: (text) => {
      problem.textContent = text ?? "";
      input.setAttribute("aria-invalid", String(Boolean(text)));
    },
  };
}

export function lockedField(setting) {
  const id = `field-${setting.name}`;
  return h(
    "div.field",
    { "data-locked": setting.name },
    h("label", { for: id }, icon("lock", 14), setting.name),
    h("input", { id, disabled: true, value: settingText(setting.value) }),
    h("div.hint", `${setting.description ?? ""} Fixed here; palestra.yaml can change it.`.trim()),
  );
}

function inputOf(setting, id, oninput) {
  const common = { id, oninput, spellcheck: "false" };
  switch (setting.kind) {
    case "boolean":
      return h("input", { ...common, type: "checkbox", checked: setting.value === true });
    case "choice":
      return h(
        "select",
        common,
        setting.choices.map((choice) =>
          h(
            "option",
            { value: settingText(choice), selected: choice === setting.value },
            settingText(choice) || "none",
          ),
        ),
      );
    case "number":
    case "integer": // a text field: "1e-5" is a number for people, and the server checks
      return h("input", {
        ...common,
        inputmode: "decimal",
        value: settingText(setting.value),
        placeholder: settingText(setting.default) || "none",
      });
    default:
      return h("input", { ...common, value: settingText(setting.value), placeholder: settingText(setting.default) });
  }
}
