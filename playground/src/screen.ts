/** What is on the screen: which panels, and whether it is dark. */

import { effect, signal, type Signal } from "@preact/signals";
import { panel, PANELS, projector, type Panel } from "./view";

/** Whether each panel is on the screen, or about to be: what it shows is computed only then. */
export const near = Object.fromEntries(PANELS.map((name) => [name, signal(false)])) as Record<Panel, Signal<boolean>>;

const preference = matchMedia("(prefers-color-scheme: dark)");

/** What the reader chose on an earlier visit, if the browser keeps it. */
function remembered(): string | null {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

let chosen = remembered();

/** Follows the system until the reader chooses. */
export const dark = signal(chosen ? chosen === "dark" : preference.matches);

export function toggleDark(): void {
  dark.value = !dark.value;
  chosen = dark.value ? "dark" : "light";
  try {
    localStorage.setItem("theme", chosen);
  } catch {
    // the choice holds for this visit
  }
}

preference.addEventListener("change", () => chosen || (dark.value = preference.matches));
effect(() => {
  document.documentElement.classList.toggle("projector", projector.value);
});
effect(() => {
  document.documentElement.style.colorScheme = dark.value ? "dark" : "light";
});

/** Watch the panels, once they are there. */
export function watchScreen(): void {
  const looked = new URLSearchParams(location.hash.slice(1)).has("at"); // a link to a character, whose bets are below it
  const close = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) near[target.id as Panel].value = isIntersecting;
    },
    { rootMargin: "300px" },
  );
  // The panel that the middle of the screen is in
  const middle = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) panel.value = target.id as Panel;
    },
    { rootMargin: "-50% 0px -50% 0px" },
  );
  const sections = PANELS.map((name) => document.getElementById(name)!);
  for (const section of sections) close.observe(section);
  const follow = () => sections.forEach((section) => middle.observe(section));
  if (panel.value === "writers") follow();
  else hold(document.getElementById(panel.value)!, looked, follow);
}

/** Keep a panel in view while the page grows, or its columns, until the reader scrolls. */
function hold(panel: HTMLElement, columns: boolean, released: () => void): void {
  const root = document.documentElement;
  let top = -1; // where the element was brought into view
  const growth = new ResizeObserver(() => {
    ((columns && panel.querySelector(".pair")) || panel).scrollIntoView({ behavior: "instant" });
    top = scrollY;
  });
  const scrolled = () => {
    if (Math.abs(scrollY - top) <= 1) return;
    growth.disconnect();
    removeEventListener("scroll", scrolled);
    root.style.overflowAnchor = "";
    released();
  };
  root.style.overflowAnchor = "none"; // else the browser scrolls, too, when the page grows
  growth.observe(document.body);
  addEventListener("scroll", scrolled);
}
