/* Two students learn in the page: what a training run is, and the workers in which runs go on.

vit.c, compiled to WebAssembly, computes; here stands in which order. The recipe is the book's for its worlds
(atbook/lab/scales.py). `openVit`, `learner` and `serve` are sent to a worker as text, because a page that is opened
from a folder may not load a worker from a file: each uses nothing but its arguments. */
"use strict";
(() => {
  const RECIPE = Object.freeze({ steps: 500, batch: 128, warmup: 0.1, smoothing: 0.1, clip: 1 });
  /* What the book's search chose for Copy in each world. */
  const TUNED = Object.freeze({ match: { lr: 0.016, decay: 0.03 }, find: { lr: 0.004, decay: 0.3 } });
  const HELD_OUT = 500, EVERY = 25; // scenes on which accuracy is measured, and after how many steps
  /* Seeds of scenes: those of "Measure" are the held-out ones, and none is trained on. */
  const FIRST_HELD_OUT = 2_000_000, FIRST_TRAINED = 5_000_000, TWINS_FROM = 1_000_000;

  /* A ViT in WebAssembly: its functions, and its arrays as they are in its memory. */
  function openVit(wasm) {
    const { exports: c } = new WebAssembly.Instance(new WebAssembly.Module(wasm), { env: { log: Math.log } });
    const most = c.most_images(), mapOfImage = 4 * 4 * 17 * 17, bytesOfImage = 3 * 32 * 32, classes = 8;
    const array = (Type, at, size) => new Type(c.memory.buffer, at, size);
    return {
      most, mapOfImage, bytesOfImage, classes, forward: c.forward, backward: c.backward, adamw: c.adamw,
      weights: array(Float32Array, c.weights_at(), c.numbers()),
      gradients: array(Float32Array, c.gradients_at(), c.numbers()),
      bytes: array(Uint8Array, c.bytes_at(), most * bytesOfImage),
      labels: array(Int32Array, c.labels_at(), most),
      maps: array(Float32Array, c.maps_at(), most * mapOfImage),
      logits: array(Float32Array, c.logits_at(), most * classes),
    };
  }

  /* One student's run. task: {recipe, lr, decay, batches, first, teacher, pixels, trained, heldOut}. first: its first
     weights, flat. teacher: those whose maps it copies, or null: then it makes its own. trained, heldOut: {bytes, seen,
     labels}, where `seen` is what the teacher sees of each image, or null for the image itself. */
  function learner(vit, task) {
    const { recipe, pixels, batches } = task, copies = task.teacher !== null;
    let step = 0;

    /* Images, labels and copied maps of some scenes into the memory of the ViT. */
    function put(data, indices) {
      indices.forEach((index, b) => {
        const { mapOfImage, bytesOfImage } = vit;
        vit.bytes.set(data.bytes.subarray(index * bytesOfImage, (index + 1) * bytesOfImage), b * bytesOfImage);
        vit.labels[b] = data.labels[index];
        if (data.maps) vit.maps.set(data.maps.subarray(index * mapOfImage, (index + 1) * mapOfImage), b * mapOfImage);
      });
      return indices.length;
    }

    function* parts(size) {
      for (let from = 0; from < size; from += vit.most) {
        yield Array.from({ length: Math.min(vit.most, size - from) }, (_, i) => from + i);
      }
    }

    /* The teacher looks once at each image, and its maps are kept: they do not change while a student learns. */
    function* prepare() {
      if (copies) vit.weights.set(task.teacher);
      for (const data of copies ? [task.trained, task.heldOut] : []) {
        const n = data.labels.length, maps = new Float32Array(n * vit.mapOfImage);
        for (const indices of parts(n)) {
          const B = put({ bytes: data.seen ?? data.bytes, labels: data.labels }, indices);
          vit.forward(B, 0, pixels.mean, pixels.std);
          maps.set(vit.maps.subarray(0, B * vit.mapOfImage), indices[0] * vit.mapOfImage);
          yield;
        }
        data.maps = maps;
      }
      vit.weights.set(task.first);
    }

    /* The learning rate of a step (from 0): it rises in a straight line, then falls as half a cosine. */
    function rate(at) {
      const rising = Math.round(recipe.warmup * recipe.steps);
      if (at < rising) return task.lr * (at + 1) / rising;
      return task.lr * 0.5 * (1 + Math.cos(Math.PI * (at - rising) / Math.max(1, recipe.steps - rising)));
    }

    function forward(data, indices) {
      const B = put(data, indices);
      vit.forward(B, copies ? 1 : 0, pixels.mean, pixels.std);
      return B;
    }

    /* The loss of the step that it makes. */
    function learn() {
      const B = forward(task.trained, batches[step]);
      const loss = vit.backward(B, copies ? 1 : 0, recipe.smoothing);
      vit.adamw(step + 1, rate(step), task.decay, recipe.clip);
      step += 1;
      return loss;
    }

    /* The share of held-out scenes whose shape it names, and on the first of them its logits and maps. */
    function examine() {
      const { heldOut } = task, n = heldOut.labels.length;
      let right = 0, one = null;
      for (const indices of parts(n)) {
        const B = forward(heldOut, indices);
        for (let b = 0; b < B; b++) {
          const answers = vit.logits.subarray(b * vit.classes, (b + 1) * vit.classes);
          right += answers.indexOf(Math.max(...answers)) === heldOut.labels[indices[b]];
        }
        one ??= { logits: vit.logits.slice(0, vit.classes), maps: vit.maps.slice(0, vit.mapOfImage) };
      }
      return { accuracy: right / n, ...one };
    }

    return { prepare, learn, examine, step: () => step };
  }

  /* What a worker does: it is given a task, and goes on until it is told to stop, with a look at its messages between
     two steps. It tells of every step, and of every examination. */
  function serve(openVit, learner) {
    let run = null, task = null, going = false, preparing = null, waiting = false;

    function next() {
      waiting = false;
      if (!going) return;
      const began = performance.now();
      if (preparing !== null) {
        if (preparing.next().done) {
          preparing = null;
          postMessage({ step: 0, ...run.examine() });
        }
      } else {
        const loss = run.learn(), step = run.step(), { steps } = task.recipe;
        const due = step % task.every === 0 || step === steps;
        postMessage({ step, loss, ...(due ? run.examine() : {}), seconds: (performance.now() - began) / 1000 });
        going = step < steps;
      }
      later();
    }

    function later() {
      if (going && !waiting) {
        waiting = true;
        setTimeout(next);
      }
    }

    onmessage = ({ data }) => {
      if (data.task) {
        task = data.task;
        run = learner(openVit(data.wasm), task);
        preparing = run.prepare();
      }
      going = data.go;
      later();
    };
  }

  /* The numbers of a model in timm's order, as vit.c has them; without a head, which a teacher has of another size. */
  function flat(model) {
    const tensors = Object.entries(model.weights).filter(([name]) => !name.startsWith("head."));
    return Float32Array.from(tensors.flatMap(([, values]) => Array.from(values)));
  }

  /* First weights as timm draws them. shapes: {name: shape} in timm's order. */
  function firstWeights(shapes, seed) {
    const next = Explorer.random(seed), normal = Explorer.normal(seed + 1);
    const numbers = [];
    for (const [name, shape] of Object.entries(shapes)) {
      const size = shape.reduce((a, b) => a * b), edge = 1 / Math.sqrt(3 * 8 * 8); // one over the root of a patch's pixels
      const draw = name.startsWith("patch_embed.") ? () => edge * (2 * next() - 1)
        : name.endsWith("bias") ? () => 0
        : /norm\d?\.weight$/.test(name) ? () => 1
        : name === "cls_token" ? () => 1e-6 * normal.next().value
        : () => 0.02 * normal.next().value;
      for (let i = 0; i < size; i++) numbers.push(draw());
    }
    return Float32Array.from(numbers);
  }

  /* The images of each step: all of them in a new order, again and again; the last step of a pass may have fewer. */
  function batchesOf(size, recipe, seed) {
    const next = Explorer.random(seed), batches = [];
    while (batches.length < recipe.steps) {
      const order = Array.from({ length: size }, (_, i) => i);
      for (let i = size - 1; i > 0; i--) { // Fisher and Yates
        const j = Math.floor((i + 1) * next());
        [order[i], order[j]] = [order[j], order[i]];
      }
      for (let from = 0; from < size; from += recipe.batch) batches.push(order.slice(from, from + recipe.batch));
    }
    return batches.slice(0, recipe.steps);
  }

  /* Scenes of a world from a seed on, drawn a few at a time: a generator, which returns {bytes, seen, labels}. twin:
     which twin of each a teacher sees, or null. */
  function* drawData(world, twin, size, from) {
    const bytesOfImage = 3 * 32 * 32, labels = new Int32Array(size);
    const bytes = new Uint8Array(size * bytesOfImage), seen = twin === null ? null : new Uint8Array(bytes.length);
    for (let i = 0; i < size; i++) {
      const scene = Explorer.draw(world, from + i);
      bytes.set(Explorer.render(scene), i * bytesOfImage);
      seen?.set(Explorer.render(Explorer.twin(scene, twin, from + i + TWINS_FROM)), i * bytesOfImage);
      labels[i] = Explorer.label(scene);
      yield (i + 1) / size;
    }
    return { bytes, seen, labels };
  }

  /* The task of a student. choices: {world, copied, labels, lr, seed}; copied: "maps", "routing", "message" or
     "nothing". A generator, because it draws scenes: it gives the share that is done, and returns the task. */
  function* taskOf(content, choices, recipe = RECIPE) {
    const { world, copied, labels, lr, seed } = choices;
    const twin = ["routing", "message"].includes(copied) ? copied : null;
    const trained = yield* drawData(world, twin, labels, FIRST_TRAINED + seed * 100_000);
    const heldOut = yield* drawData(world, twin, HELD_OUT, FIRST_HELD_OUT);
    const { tensors } = content.worlds[world].scratch;
    const shapes = Object.fromEntries(Object.entries(tensors).map(([name, { shape }]) => [name, shape]));
    return {
      recipe, lr, decay: TUNED[world].decay, every: EVERY, pixels: content.pixels, trained, heldOut,
      batches: batchesOf(labels, recipe, seed), first: firstWeights(shapes, seed),
      teacher: copied === "nothing" ? null : flat(Explorer.readModel(content, world, "teacher")),
    };
  }

  const bytesOf = base64 => Uint8Array.from(atob(base64), character => character.charCodeAt(0));

  /* Whether this browser can: no WebAssembly, or one without SIMD, refuses the module. */
  const canLearn = () => typeof WebAssembly === "object" && WebAssembly.validate(bytesOf(Explorer.VIT_WASM));

  /* A worker that has the task, and waits. heard: is called with what it tells. */
  function startWorker(task, heard) {
    const source = `"use strict"; (${serve})(${openVit}, ${learner});`;
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const worker = new Worker(address);
    URL.revokeObjectURL(address);
    worker.onmessage = ({ data }) => heard(data);
    worker.postMessage({ wasm: bytesOf(Explorer.VIT_WASM), task, go: false });
    return { go: () => worker.postMessage({ go: true }), stop: () => worker.postMessage({ go: false }), end: () => worker.terminate() };
  }

  globalThis.Explorer = Object.assign(globalThis.Explorer ?? {}, {
    RECIPE, TUNED, FIRST_HELD_OUT, openVit, learner, flat, firstWeights, batchesOf, taskOf, canLearn, startWorker, bytesOf,
  });
})();
