// A plain loop in JavaScript, with the `openai` npm package and Chat Completions.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const catalogue = JSON.parse(readFileSync(new URL("catalogue.json", import.meta.url)));
const numbers = {
  type: "object",
  properties: {
    a: { type: "integer", description: "The first number." },
    b: { type: "integer", description: "The second number." },
  },
  required: ["a", "b"],
};
const item = {
  type: "object",
  properties: { item: { type: "string", description: "The name of the item." } },
  required: ["item"],
};
const functions = {
  price: ["Look up the price of one item.", item, ({ item }) => catalogue[item.trim().toLowerCase().replace(/s$/, "")]],
  multiply: ["Multiply two numbers.", numbers, ({ a, b }) => a * b],
  add: ["Add two numbers.", numbers, ({ a, b }) => a + b],
};
const tools = Object.entries(functions).map(([name, [description, parameters]]) => ({
  type: "function",
  function: { name, description, parameters },
}));

function call({ name, arguments: text }) {
  try {
    const result = functions[name][2](JSON.parse(text));
    return result === undefined ? "Error: no such item" : String(result);
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY
const messages = [
  { role: "system", content: "You work in a shop. Use the tools to answer." },
  { role: "user", content: JSON.parse(readFileSync(0, "utf8")).input },
];
for (let round = 0; round < 6; round++) {
  const { choices } = await client.chat.completions.create({ model: "gpt-4.1-mini", messages, tools });
  const reply = choices[0].message;
  messages.push(reply);
  if (!reply.tool_calls?.length) {
    console.log(reply.content);
    break;
  }
  for (const { id, function: asked } of reply.tool_calls) {
    messages.push({ role: "tool", tool_call_id: id, content: call(asked) });
  }
}
