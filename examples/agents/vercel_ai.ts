// The same agent in TypeScript with the Vercel AI SDK.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const catalogue: Record<string, number> = JSON.parse(readFileSync(new URL("catalogue.json", import.meta.url), "utf8"));
const numbers = z.object({
  a: z.number().int().describe("The first number."),
  b: z.number().int().describe("The second number."),
});
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const { text } = await generateText({
  model: openai.chat("gpt-4.1-mini"),
  system: "You work in a shop. Use the tools to answer.",
  prompt: JSON.parse(readFileSync(0, "utf8")).input,
  stopWhen: stepCountIs(6),
  tools: {
    price: tool({
      description: "Look up the price of one item.",
      inputSchema: z.object({ item: z.string().describe("The name of the item.") }),
      execute: async ({ item }) => String(catalogue[item.trim().toLowerCase().replace(/s$/, "")] ?? "Error: no item"),
    }),
    multiply: tool({
      description: "Multiply two numbers.",
      inputSchema: numbers,
      execute: async ({ a, b }) => String(a * b),
    }),
    add: tool({ description: "Add two numbers.", inputSchema: numbers, execute: async ({ a, b }) => String(a + b) }),
  },
});
console.log(text);
