/* A prediction (tools/predictions.py): its choices become buttons. The first click says what comes out and
   opens the explanation. */
for (const predict of document.querySelectorAll(".predict")) {
  const answer = predict.querySelector("details"), right = predict.dataset.right;
  const says = document.createElement("p");
  says.setAttribute("role", "status");
  answer.before(says);
  const buttons = [...predict.querySelectorAll(".choices > li")].map((choice) => {
    const button = document.createElement("button"), text = choice.querySelector("p") ?? choice;
    button.type = "button";
    button.append(...text.childNodes);
    button.setAttribute("aria-pressed", "false");
    choice.replaceChildren(button);
    return button;
  });
  const letter = (button) => button.querySelector("strong").textContent;
  for (const button of buttons) {
    button.addEventListener("click", () => {
      answer.open = true;
      if (says.textContent) return;  // what was predicted stays
      button.setAttribute("aria-pressed", "true");
      for (const other of buttons) {
        other.setAttribute("aria-disabled", "true");
        other.classList.toggle("right", letter(other) === right);
      }
      const [chosen, found] = [letter(button), right].map((name) => name.replace(".", ""));
      says.textContent = chosen === found ? `You predicted ${chosen}, and so it is.`
                                          : `You predicted ${chosen}. It is ${found}.`;
    });
  }
}
