/* The settings of a run; those that differ from the defaults first. */

import { getRun, runHead } from "../components/run_head.js";
import { facts, searchBox } from "../components/parts.js";
import { h, replace } from "../lib/dom.js";
import { NONE, settingText } from "../lib/format.js";
import { textBlock } from "../lib/text.js";

export async function show({ names: [id], signal }) {
  const run = await getRun(id, signal);
  const all = flatten(run.config ?? {});
  const changed = new Set(run.changed ?? []);
  const list = h("div");
  const draw = (word) => replace(list, rows(all.filter(([key]) => key.includes(word.toLowerCase()))));
  draw("");
  const search = searchBox("Search settings", draw);
  const tools = run.record?.tools ?? [];
  return [
    runHead(run, "config"),
    h(
      "div.columns",
      h(
        "div.stack",
        h("section.card", h("h2", "Changed from the defaults"), rows(all.filter(([key]) => changed.has(key)))),
        h("section.card", h("h2", "All settings"), h("div.filters", search), list),
      ),
      h(
        "div.stack",
        run.record?.instructions
          ? h("section.card", h("h2", "Instructions"), textBlock(run.record.instructions))
          : null,
        tools.length
          ? h(
              "section.card",
              h("h2", "Tools"),
              facts(tools.map(({ function: tool }) => [h("code", tool.name), tool.description ?? ""])),
            )
          : null,
      ),
    ),
  ];
}

const rows = (pairs) =>
  pairs.length
    ? facts(pairs.map(([key, value]) => [h("code", key), h("span.mono", settingText(value) || NONE)]))
    : h("p.soft", "None.");

function flatten(config, prefix = "") {
  return Object.entries(config).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flatten(value, `${prefix}${key}.`)
      : [[prefix + key, value]],
  );
}
