// What scrolls sideways, such as long lines of code and wide tables, takes the focus, so that arrow keys scroll it.
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

// The theme wraps tables when the page has been loaded.
addEventListener("load", () => {
  const selector = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset .output";
  document.querySelectorAll(selector).forEach((node) => observer.observe(node));
});
