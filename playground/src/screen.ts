/** What is on the screen: which panels, and whether it is dark. */

import { effect, signal, type Signal } from "@preact/signals";
import { panel, PANELS, type Panel } from "./view";

/** Whether each panel is on the screen, or about to be: what it shows is computed only then. */
export const near = Object.fromEntries(PANELS.map((name) => [name, signal(false)])) as Record<Panel, Signal<boolean>>;

const preference = matchMedia("(prefers-color-scheme: dark)");

/** Follows the system until the reader chooses. */
export const dark = signal(preference.matches);

let chosen = false;

export function toggleDark(): void {
  chosen = true;
  dark.value = !dark.value;
}

preference.addEventListener("change", () => chosen || (dark.value = preference.matches));
effect(() => {
  document.documentElement.style.colorScheme = dark.value ? "dark" : "light";
});

/** Watch the panels, once they are there. */
export function watchScreen(): void {
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
  for (const name of PANELS) {
    close.observe(document.getElementById(name)!);
    middle.observe(document.getElementById(name)!);
  }
}
