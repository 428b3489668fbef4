/* "Train it here": two students start from the same weights, and learn in front of the reader. */
"use strict";
(() => {
  const { el, svg, controls, percent, placeOf, paint, rowOf, softmax, likeliest } = Explorer;
  const CLASSES = 8, L = 4, SLICE = 30; // milliseconds in which scenes are drawn before the page gets a turn
  const COPIED = {
    maps: "its teacher's maps", routing: "maps of a routing twin", message: "maps of a message twin", nothing: "nothing",
  };
  const TITLES = {
    maps: "Student with its teacher's maps", routing: "Student with maps of a routing twin",
    message: "Student with maps of a message twin", nothing: "Student with its own maps",
  };
  const LABELS = [200, 400, 1000, 2000];
  const RATES = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064];
  const LOOKS = ["explorer-one", "explorer-other"]; // of the two students' curves

  const secondsText = seconds => (seconds < 90 ? `${Math.ceil(seconds)} seconds` : `${Math.ceil(seconds / 60)} minutes`);

  /* A picture of curves over the steps. curves: two lists of [step, value]; line: a value with a name, or null. */
  function chart(title, format, highest, line) {
    const W = 320, TALL = 180, left = 44, right = 8, top = 10, bottom = 24;
    const drawing = svg("svg", { viewBox: `0 0 ${W} ${TALL}`, role: "img", class: "explorer-chart" });

    function show(curves, steps, said) {
      const most = highest ?? Math.max(2.2, ...curves.flat().map(([, value]) => value));
      const x = step => left + (W - left - right) * step / steps, y = value => top + (TALL - top - bottom) * (1 - value / most);
      const text = (at, content, attributes) => svg("text", { ...at, ...attributes }, content);
      const marks = [0, 0.25, 0.5, 0.75, 1].map(share => share * most);
      drawing.replaceChildren(
        ...marks.flatMap(value => [
          svg("line", { x1: left, x2: W - right, y1: y(value), y2: y(value), class: "explorer-grid" }),
          text({ x: left - 5, y: y(value) + 4 }, format(value), { "text-anchor": "end" }),
        ]),
        text({ x: left, y: TALL - 6 }, "step 0"), text({ x: W - right, y: TALL - 6 }, String(steps), { "text-anchor": "end" }),
        ...(line ? [svg("line", { x1: left, x2: W - right, y1: y(line.value), y2: y(line.value), class: "explorer-guess" }),
          text({ x: W - right, y: y(line.value) - 4 }, line.name, { "text-anchor": "end" })] : []),
        ...curves.map((curve, i) => svg("polyline", {
          class: LOOKS[i], points: curve.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" "),
        })));
      drawing.setAttribute("aria-label", `${title}. ${said}`);
    }

    return { figure: el("figure", {}, el("figcaption", {}, title), drawing), show };
  }

  /* One student: its name, what it answers to one new scene, and where its class token looks. */
  function panel(index) {
    const title = el("p", { className: `explorer-name ${LOOKS[index]}-name` });
    const score = el("p", { className: "explorer-score" });
    const scene = el("canvas");
    scene.setAttribute("role", "img");
    const shades = Array.from({ length: 16 }, () => el("span"));
    const stage = el("div", { className: "explorer-stage" }, scene, el("div", { className: "explorer-cells" }, ...shades));
    const maps = Array.from({ length: L }, () => Array.from({ length: 17 }, () => el("i")));
    const table = el("div", { className: "explorer-layers" }, ...maps.map((cells, l) =>
      el("div", {}, el("div", { className: "explorer-map" }, ...cells), `layer ${l}`)));
    table.setAttribute("aria-hidden", "true"); // the scene's name says it in words
    const says = el("p");
    const box = el("section", {}, title, score, el("p", {}, "of 500 new scenes named correctly"), stage, says,
      el("p", {}, "Where its class token looks, in each layer:"), table);
    return { title, score, scene, shades, maps, says, box };
  }

  /* The training inside an element, with the teachers of `content`. */
  function openTraining(root, content) {
    const { select } = controls();
    const choice = { world: "match", labels: 1000, lr: Explorer.TUNED.match.lr, copied: ["maps", "nothing"] };
    let run = null, seed = 0;
    root.classList.add("explorer", "explorer-training");

    function changed(patch) {
      Object.assign(choice, patch);
      clear();
    }

    const world = select("World", ["match", "find"].map(name => [name, Explorer.NAMES[name]]), value => {
      rate.menu.value = Explorer.TUNED[value].lr;
      changed({ world: value, lr: Explorer.TUNED[value].lr });
    });
    const labels = select("Labelled scenes", LABELS.map(n => [n, n.toLocaleString("en")]), value => changed({ labels: +value }));
    const rate = select("Learning rate", RATES.map(lr => [lr, String(lr)]), value => changed({ lr: +value }));
    const copied = ["The first student copies", "The second one copies"].map((label, i) =>
      select(label, Object.entries(COPIED), value => changed({ copied: choice.copied.with(i, value) })));
    labels.menu.value = choice.labels;
    rate.menu.value = choice.lr;
    copied.forEach(({ menu }, i) => (menu.value = choice.copied[i]));

    const train = el("button", { type: "button", className: "explorer-main", onclick: goOrStop }, "Train");
    const again = el("button", { type: "button", onclick: () => { seed += 1; clear(); goOrStop(); } }, "Again, from other weights");
    const progress = el("progress", { max: 1, value: 0 });
    progress.setAttribute("aria-label", "training");
    const status = el("p", { className: "explorer-status" });
    status.setAttribute("role", "status");
    const asks = el("p", { className: "explorer-name" }), panels = [panel(0), panel(1)];
    const guess = { value: 1 / CLASSES, name: "guessing" };
    const accuracy = chart("Share of 500 new scenes named correctly", percent, 1, guess);
    const loss = chart("Training loss", value => value.toFixed(1), null, null);
    const row = (...children) => el("div", { className: "explorer-row" }, ...children);
    root.replaceChildren(
      row(copied[0].field, copied[1].field, world.field, labels.field, rate.field),
      row(train, again, progress), status, asks,
      el("div", { className: "explorer-two" }, ...panels.map(({ box }) => box)),
      el("div", { className: "explorer-two explorer-charts" }, accuracy.figure, loss.figure));

    /* One run of two students; what was heard of each: losses, accuracies, the last examination, seconds of a step. */
    function newRun() {
      const students = choice.copied.map(what => ({
        what, losses: [], accuracies: [], seen: null, seconds: 0, step: 0, worker: null,
      }));
      return { students, going: false, drawn: 0, ended: false };
    }

    function clear() {
      if (run) {
        run.ended = true;
        run.students.forEach(({ worker }) => worker?.end());
      }
      run = newRun();
      show();
    }

    function goOrStop() {
      if (finished()) clear();
      run.going = !run.going;
      if (run.drawn === 0) startDrawing(run);
      else for (const { worker } of run.students) run.going ? worker?.go() : worker?.stop();
      show();
    }

    const steps = Explorer.RECIPE.steps;
    const finished = () => run.students.every(({ step }) => step === steps);

    /* In slices, so that the page stays alive; a student starts when its scenes are there. */
    function startDrawing(mine) {
      const waiting = mine.students.slice();
      mine.drawn = 0.001;
      let task = null;
      (function slice() {
        if (mine.ended) return;
        const student = waiting[0], index = mine.students.length - waiting.length;
        const { world: of, labels: size, lr } = choice;
        task ??= Explorer.taskOf(content, { world: of, copied: student.what, labels: size, lr, seed });
        let drawn = task.next();
        for (const end = performance.now() + SLICE; !drawn.done && performance.now() < end;) drawn = task.next();
        if (drawn.done) {
          student.worker = Explorer.startWorker(drawn.value, told => hear(mine, student, told));
          waiting.shift();
          task = null;
        }
        mine.drawn = (index + (drawn.done ? 1 : 0.5)) / mine.students.length;
        if (waiting.length > 0) setTimeout(slice);
        else if (mine.going) mine.students.forEach(({ worker }) => worker.go());
        show();
      })();
    }

    function hear(mine, student, told) {
      if (mine.ended) return;
      student.step = told.step;
      if (told.loss !== undefined) student.losses.push([told.step, told.loss]);
      if (told.seconds) student.seconds += (told.seconds - student.seconds) / Math.min(told.step, 20);
      if (told.accuracy !== undefined) {
        student.accuracies.push([told.step, told.accuracy]);
        student.seen = told;
      }
      if (finished()) mine.going = false;
      soon();
    }

    let due = false; // one drawing for all that is heard in a moment
    function soon() {
      if (due) return;
      due = true;
      setTimeout(() => { due = false; show(); }, 100);
    }

    const scoreOf = student => student.accuracies.at(-1)?.[1];

    function statusText() {
      if (finished()) {
        const said = run.students.map(s => `the ${TITLES[s.what].replace("Student", "student")} names ${percent(scoreOf(s))} correctly`);
        return `Done. Of 500 scenes that neither has seen, ${said[0]}, and ${said[1]}. Guessing is 12.5 %.`;
      }
      if (run.drawn === 0) return "Both start from the same weights and see the same scenes in the same order. On two idle cores of a laptop it takes about a minute.";
      if (run.drawn < 1) return "Drawing scenes …";
      const slowest = Math.max(...run.students.map(({ seconds, step }) => seconds * (steps - step)));
      const at = `Step ${Math.min(...run.students.map(({ step }) => step))} of ${steps}.`;
      if (!run.going) return `${at} Stopped.`;
      if (slowest === 0) return "The teacher looks at every scene once …";
      return `${at} About ${secondsText(slowest)} left${slowest > 180 ? ": this machine is slow; you can read on meanwhile" : ""}.`;
    }

    function show() {
      train.textContent = finished() ? "Train again" : run.going ? "Stop" : run.drawn > 0 ? "Go on" : "Train";
      again.disabled = run.drawn === 0;
      progress.value = run.students.reduce((sum, { step }) => sum + step / steps / 2, 0);
      asks.textContent = `The question: ${Explorer.ASKS[choice.world]}`;
      const text = statusText();
      if (status.textContent !== text) status.textContent = text;
      // numbers that change ten times a second are for the eye alone
      status.setAttribute("aria-live", run.going && run.drawn === 1 ? "off" : "polite");
      const scene = Explorer.draw(choice.world, Explorer.FIRST_HELD_OUT), clear = Explorer.render(scene, { ...Explorer.WORLD, noise: 0 });
      panels.forEach((one, i) => showStudent(one, run.students[i], scene, clear));
      const said = run.students.map(s => `${TITLES[s.what]}: ${scoreOf(s) === undefined ? "not trained yet" : percent(scoreOf(s))}`);
      accuracy.show(run.students.map(s => s.accuracies), steps, said.join("; "));
      const lost = run.students.map(s => `${TITLES[s.what]}: ${s.losses.at(-1)?.[1].toFixed(2) ?? "not trained yet"}`);
      loss.show(run.students.map(s => s.losses), steps, lost.join("; "));
    }

    function showStudent(one, student, scene, clear) {
      const label = Explorer.label(scene), share = scoreOf(student);
      one.title.textContent = TITLES[student.what];
      one.score.textContent = share === undefined ? "–" : percent(share);
      paint(one.scene, clear);
      one.shades.forEach((shade, cell) => shade.classList.toggle("explorer-target", cell === scene.cell));
      const rows = student.seen && Array.from({ length: L }, (_, l) =>
        rowOf(student.seen.maps.subarray(l * 4 * 17 * 17), "mean", 0));
      one.maps.forEach((cells, l) => cells.forEach((cell, j) => (cell.style.opacity = rows ? rows[l][j] : 0)));
      const most = rows ? Math.max(...rows[L - 1].slice(1)) : 1;
      one.shades.forEach((shade, cell) => shade.style.setProperty("--dim", rows ? 0.75 * (1 - rows[L - 1][cell + 1] / most) : 0));
      if (!rows) {
        one.says.textContent = "A scene that it will not learn from. The dashed frame is the target, which the question asks for.";
        one.scene.setAttribute("aria-label", "A scene; nothing is trained yet");
        return;
      }
      const shares = softmax(student.seen.logits), answer = likeliest(shares), at = likeliest(rows[L - 1].slice(1));
      const verdict = answer === label ? "right" : `wrong, it is ${content.shapes[label]}`;
      one.says.textContent = `It answers ${content.shapes[answer]} (${percent(shares[answer])}): ${verdict}.`;
      const where = at === scene.cell ? "where the glyph in question is" : `and the glyph in question is at ${placeOf(scene.cell)}`;
      one.scene.setAttribute("aria-label", `A scene. In the last layer the class token looks most at ${placeOf(at)}, ${where}`);
    }

    if (!Explorer.canLearn()) {
      train.disabled = true;
      clear();
      status.textContent = "This browser has no WebAssembly with SIMD, which training here needs.";
      return;
    }
    clear();
  }

  const root = document.getElementById("explorer-training");
  if (root) openTraining(root, globalThis.ExplorerWeights);
})();
