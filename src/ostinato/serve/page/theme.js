// Light or dark: as the system has it until the button is pressed. It runs before anything is drawn.

(() => {
  const KEPT = "ostinato-theme";
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  /** The theme that was chosen; "" if none was, or if the browser keeps nothing. */
  function chosen() {
    try {
      return ["light", "dark"].find((each) => each === localStorage.getItem(KEPT)) ?? "";
    } catch {
      return "";
    }
  }

  root.style.colorScheme = chosen();
  document.addEventListener("DOMContentLoaded", () =>
    document.getElementById("theme")?.addEventListener("click", () => {
      const now = root.style.colorScheme || (isDark.matches ? "dark" : "light");
      const next = now === "dark" ? "light" : "dark";
      root.style.colorScheme = next;
      try {
        localStorage.setItem(KEPT, next);
      } catch {
        // It holds until the page is closed.
      }
    }),
  );
})();
