/* Steps of the tour, and the training, inside a page: scripts and weights are loaded when a step comes near to what is
   seen. */
"use strict";
(() => {
  const folder = new URL(".", document.currentScript.src).href;
  const SCRIPTS = ["tour-weights", "model", "scenes", "page", "state", "tour-drawing", "tour"];
  if (document.getElementById("explorer-training")) SCRIPTS.push("vit-wasm", "learning", "training");

  function load(names) {
    if (names.length === 0) return Explorer.openTours(globalThis.ExplorerWeights, new URL("../../book/play.html", folder).href);
    const script = document.createElement("script");
    script.src = `${folder}${names[0]}.js`;
    script.onload = () => load(names.slice(1));
    document.body.append(script);
  }

  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = `${folder}explorer.css`;
  document.head.append(style);
  const near = new IntersectionObserver(seen => {
    if (!seen.some(one => one.isIntersecting)) return;
    near.disconnect();
    load(SCRIPTS);
  }, { rootMargin: "600px" });
  for (const block of document.querySelectorAll(".tour-here")) near.observe(block);
})();
