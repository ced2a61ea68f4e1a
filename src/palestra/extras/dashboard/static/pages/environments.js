/* What can be trained in: the environments that are installed or lie in this folder. */

import { empty, notice, pageHead, searchBox } from "../components/parts.js";
import { get } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { byFamily, plural } from "../lib/format.js";
import { setKeys } from "../lib/keys.js";
import { link } from "../lib/router.js";
import { breakable, oneLine } from "../lib/text.js";

export async function show({ signal }) {
  const { environments, errors = {} } = await get("environments", {}, signal);
  const count = h("span.soft.small", { role: "status" });
  const list = h("div");
  const draw = (word) => {
    const found = environments.filter(({ name, description = "" }) =>
      `${name} ${description}`.toLowerCase().includes(word),
    );
    count.textContent = plural(found.length, "environment");
    const cards = byFamily(found).map(([family, members]) => (family ? familyCard(family, members) : card(members[0])));
    replace(list, found.length ? h("div.grid", cards) : h("div.card", nothing(environments)));
  };
  const search = searchBox("Search environments", (text) => draw(text.toLowerCase()));
  draw("");
  setKeys({ "/": ["Search", () => search.focus()] });
  return [
    pageHead("Environments", { lead: "Problems, tools and scores. Each can be tried with one click before a run." }),
    h("div.filters", search, count),
    h(
      "div.stack",
      Object.entries(errors).map(([file, why]) => notice("warn", h("b.mono", file), h("p", why))),
      list,
    ),
  ];
}

function card(environment) {
  return h(
    "article.card",
    h(
      "div.card-head",
      h("h2.break", h("a", { href: link(["environments", environment.name]) }, breakable(environment.name))),
      h("span.pill", environment.origin),
    ),
    h("p.soft", oneLine(environment.description ?? "", 200)),
  );
}

/** All datasets of a family behind one entry, with a filter of its own. */
function familyCard(family, members) {
  const links = h("ul.small.members");
  const draw = (word) =>
    replace(
      links,
      members
        .filter(({ name }) => name.toLowerCase().includes(word))
        .map(({ name }) => h("li", h("a", { href: link(["environments", name]) }, name.slice(family.length + 1)))),
    );
  draw("");
  const filter = searchBox(`Filter ${family}`, (text) => draw(text.toLowerCase()));
  return h(
    "article.card",
    h("div.card-head", h("h2.break", family), h("span.pill", plural(members.length, "dataset"))),
    filter,
    links,
  );
}

const nothing = (all) =>
  all.length
    ? empty("No environment matches", "Change the search.")
    : empty("No environments", "An environment is a Python file: see the tutorial.");
