/* What the explorer's parts of a page share: elements, names, pictures of scenes and shapes. */
"use strict";
(() => {
  const { BITMAPS } = Explorer;
  const GRID = 4;
  const NAMES = {
    find: "Find", match: "Match",
    teacher: "teacher", scratch: "scratch", copy: "Copy", distill: "Distill", "fine-tune": "fine-tuned",
    "copy-untrained": "Copy, teacher untrained",
    own: "its own", teacherMaps: "its teacher's", twin: "its teacher's on a twin", uniform: "uniform",
    painted: "painted by hand",
    routing: "same places, other shapes", message: "same shape, other places", distractors: "other distractors",
    unrelated: "nothing the same",
  };
  /* What a world asks of every scene. */
  const ASKS = {
    match: "which shape has the key's colour? The key is the framed square.",
    find: "which shape is in the cell with four white corners?",
  };

  function el(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  /* An element of a drawing; attributes, not properties. */
  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function fill(menu, values) {
    menu.replaceChildren(...values.map(([value, text]) => el("option", { value }, text)));
  }

  let opened = 0; // so that no two explorers of a page share a name

  /* Controls with a label each, whose names no other part of the page has. */
  function controls() {
    const own = `explorer-${++opened}`;

    function field(label, control, ...more) {
      control.id = `${own}-${label.toLowerCase().replaceAll(" ", "-")}`;
      const named = el("label", { htmlFor: control.id }, label);
      return el("div", { className: "explorer-field" }, el("div", {}, named, ...more), control);
    }

    function select(label, values, onchange) {
      const menu = el("select", { onchange: () => onchange(menu.value) });
      fill(menu, values);
      return { field: field(label, menu), menu };
    }

    return { field, select };
  }

  /* bytes (3, side, side) on a canvas. */
  function paint(canvas, bytes) {
    const area = bytes.length / 3, side = Math.sqrt(area), rgba = new Uint8ClampedArray(4 * area).fill(255);
    for (let i = 0; i < area; i++) for (let c = 0; c < 3; c++) rgba[4 * i + c] = bytes[c * area + i];
    canvas.width = canvas.height = side;
    canvas.getContext("2d").putImageData(new ImageData(rgba, side, side), 0, 0);
  }

  function icon(shape) {
    const rows = BITMAPS[shape].flatMap((row, y) => [...row].map((c, x) => (c === "#" ? `M${x} ${y}h1v1h-1z` : "")));
    return svg("svg", { viewBox: "0 0 6 6", "aria-hidden": "true" }, svg("path", { fill: "currentColor", d: rows.join("") }));
  }

  /* The token's row of a head's map, or of the mean over heads: N shares that sum to 1. */
  function rowOf(map, head, token) {
    const N = 17, heads = head === "mean" ? [0, 1, 2, 3] : [+head];
    const share = j => heads.reduce((sum, h) => sum + map[(h * N + token) * N + j], 0) / heads.length;
    return Array.from({ length: N }, (_, j) => share(j));
  }

  function softmax(logits) {
    const powers = Array.from(logits, value => Math.exp(value - Math.max(...logits)));
    return powers.map(power => power / powers.reduce((a, b) => a + b));
  }

  Object.assign(Explorer, {
    NAMES, ASKS, el, svg, fill, controls, paint, icon, rowOf, softmax,
    nameOf: name => NAMES[name] ?? name, // a reader's own models have names of their own
    percent: share => `${Math.round(100 * share)} %`,
    placeOf: cell => `row ${Math.floor(cell / GRID)}, column ${cell % GRID}`, // from 0, as the book counts
    capital: text => text[0].toUpperCase() + text.slice(1),
    likeliest: answers => answers.indexOf(Math.max(...answers)),
  });
})();
