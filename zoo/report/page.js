"use strict";
// Shows one model at a time, and tells a finger that taps a chart what a pointer above it is told.

const sections = [...document.querySelectorAll("main > section")];

// shows the model that the address names; one that names none leaves the model that is shown
function choose() {
  const target = document.getElementById(location.hash.slice(1));
  const chosen = target?.closest("main > section") ?? sections.find((part) => !part.hidden);
  for (const section of sections) section.hidden = section !== chosen;
  for (const link of document.querySelectorAll("nav.models a")) {
    const leads = chosen.contains(document.getElementById(link.hash.slice(1)));
    link.ariaCurrent = leads ? "true" : null;
  }
  target?.scrollIntoView();
}

document.addEventListener("click", ({ target, pointerType }) => {
  const tip = pointerType === "touch" && target.querySelector?.(":scope > title");
  document.querySelector(".told")?.remove();
  if (!tip || !target.closest(".picture")) return;
  const told = Object.assign(document.createElement("p"), { className: "told" });
  told.textContent = tip.textContent;
  target.closest(".picture").append(told);
});

if (sections.length) {
  choose();
  addEventListener("hashchange", choose);
}
