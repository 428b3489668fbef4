/* What `test_learning.py` asks of the explorer's scripts, in node: node learn.mjs SCRIPT..., with a question on stdin,
{ask, ...}, whose answer is one line of JSON on stdout. Arrays are base64 of their bytes. */
import { readFileSync } from "node:fs";

for (const file of process.argv.slice(2)) (0, eval)(readFileSync(file, "utf8")); // a classic script, as in a page

const numbers = (text, Type) => new Type(Uint8Array.from(Buffer.from(text, "base64")).buffer);
const text = array => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");
const vit = Explorer.openVit(Explorer.bytesOf(Explorer.VIT_WASM));
const data = ({ bytes, seen, labels }) => ({
  bytes: numbers(bytes, Uint8Array), seen: seen && numbers(seen, Uint8Array), labels: numbers(labels, Int32Array),
});

const ANSWERS = {
  /* The learner of a task; losses of its steps, and of the first the gradients; its weights and answers at the end. */
  learn({ task }) {
    const run = Explorer.learner(vit, {
      ...task, first: numbers(task.first, Float32Array), trained: data(task.trained), heldOut: data(task.heldOut),
      teacher: task.teacher && numbers(task.teacher, Float32Array),
    });
    for (const _ of run.prepare());
    const losses = [];
    let gradients = null;
    for (const _ of task.batches) {
      losses.push(run.learn());
      gradients ??= text(vit.gradients);
    }
    const { accuracy, logits, maps } = run.examine();
    return { losses, gradients, weights: text(vit.weights), accuracy, logits: text(logits), maps: text(maps) };
  },

  /* A whole run by the page's own recipe: accuracy at each examination, and processor seconds a step. */
  run({ choices, recipe }) {
    const scenes = Explorer.taskOf(ExplorerWeights, choices, { ...Explorer.RECIPE, ...recipe });
    let drawn;
    do drawn = scenes.next(); while (!drawn.done);
    const task = drawn.value, run = Explorer.learner(vit, task), accuracies = [];
    for (const _ of run.prepare());
    const began = process.cpuUsage();
    for (const _ of task.batches) run.learn();
    const { user, system } = process.cpuUsage(began);
    return { accuracy: run.examine().accuracy, seconds: (user + system) / 1e6 / task.batches.length };
  },

  first: ({ shapes, seed }) => text(Explorer.firstWeights(shapes, seed)),
  batches: ({ size, steps, batch, seed }) => Explorer.batchesOf(size, { steps, batch }, seed),
  tuned: () => ({ recipe: Explorer.RECIPE, tuned: Explorer.TUNED }),
};

const question = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(ANSWERS[question.ask](question)));
