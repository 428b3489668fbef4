// A prediction is made before its outcome is seen: what follows **Predict.** on a slide comes with the next key.
// Without this script, and in print, all of a slide is there.
document.addEventListener("DOMContentLoaded", () => {
  for (const asked of document.querySelectorAll(".reveal section > p > strong:first-child")) {
    if (asked.textContent !== "Predict.") continue;
    for (let part = asked.parentElement.nextElementSibling; part; part = part.nextElementSibling) {
      if (!part.matches("aside")) part.classList.add("fragment");
    }
  }
  if (window.Reveal?.isReady?.()) Reveal.sync();
});
