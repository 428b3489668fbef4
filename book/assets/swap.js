/* A picture with several states, `<div class="swap" data-label="...">`. Each state begins with a line in bold;
   the lines become tabs, and the state of one tab is shown. A click on the picture goes to the next state.
   Without JavaScript all states stand one below the other. */
for (const [at, swap] of document.querySelectorAll(".swap").entries()) {
  const tabs = [], panels = [], list = document.createElement("div");
  for (const node of [...swap.children]) {
    if (node.matches("p") && node.firstElementChild?.matches("strong:only-child")) {
      const tab = document.createElement("button"), panel = document.createElement("div");
      tab.type = "button";
      tab.append(...node.firstElementChild.childNodes);
      node.replaceWith(panel);
      tabs.push(tab);
      panels.push(panel);
    } else {
      panels.at(-1)?.append(node);
    }
  }
  const show = chosen => {
    for (const [i, tab] of tabs.entries()) {
      tab.setAttribute("aria-selected", String(i === chosen));
      tab.tabIndex = i === chosen ? 0 : -1;
      panels[i].classList.toggle("shown", i === chosen);
    }
  };
  const next = (i, by) => (i + by + tabs.length) % tabs.length;
  list.setAttribute("role", "tablist");
  list.setAttribute("aria-label", swap.dataset.label);
  list.append(...tabs);
  for (const [i, tab] of tabs.entries()) {
    const [of, has] = [`swap-${at}-tab-${i}`, `swap-${at}-panel-${i}`];
    tab.id = of;
    tab.setAttribute("role", "tab");
    panels[i].id = has;
    panels[i].setAttribute("role", "tabpanel");
    tab.setAttribute("aria-controls", has);
    panels[i].setAttribute("aria-labelledby", of);
    tab.addEventListener("click", () => show(i));
    tab.addEventListener("keydown", event => {
      const to = { ArrowRight: next(i, 1), ArrowLeft: next(i, -1), Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(to);
      tabs[to].focus();
    });
    panels[i].querySelector("svg, img")?.addEventListener("click", () => show(next(i, 1)));
  }
  swap.prepend(list);
  swap.classList.add("live");
  show(0);
}
