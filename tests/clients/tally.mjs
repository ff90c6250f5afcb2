// tally.py for programs in JavaScript: what they are told, and how they tell what they have tried.

import { appendFileSync } from "node:fs";
import { join } from "node:path";

export const [url, model, , folder, scriptedUrl, scriptedModel] = process.argv.slice(2);

export async function check(name, tried) {
  let failure = "";
  try {
    await tried();
  } catch (error) {
    failure = `${error.name}: ${error.message}`.slice(0, 600);
  }
  appendFileSync(join(folder, "results.jsonl"), JSON.stringify({ check: name, failure }) + "\n");
}
