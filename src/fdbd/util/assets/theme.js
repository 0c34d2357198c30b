// Light or dark: as the system says, or as was chosen with the button; kept for the next page.

function startTheme() {
  const root = document.documentElement;
  const store = (value) => { try { localStorage.setItem("fdbd-theme", value); } catch { /* a page from a file may not store */ } };
  let kept = null;
  try { kept = localStorage.getItem("fdbd-theme"); } catch { /* as above */ }
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store(root.dataset.theme);
  });
}
