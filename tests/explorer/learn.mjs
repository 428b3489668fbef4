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

  /* What the task of a run is to the committed student, which has learned it: its accuracy on either set of scenes. */
  known({ choices }) {
    const scenes = Explorer.taskOf(ExplorerWeights, choices);
    let drawn;
    do drawn = scenes.next(); while (!drawn.done);
    const { weights } = Explorer.readModel(ExplorerWeights, choices.world, "copy");
    const first = Float32Array.from(Object.values(weights).flatMap(values => Array.from(values)));
    return ["trained", "heldOut"].map(part => {
      const run = Explorer.learner(vit, { ...drawn.value, first, heldOut: drawn.value[part] });
      for (const _ of run.prepare());
      return run.examine().accuracy;
    });
  },

  first: ({ shapes, seed }) => text(Explorer.firstWeights(shapes, seed)),
};

const question = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(ANSWERS[question.ask](question)));
