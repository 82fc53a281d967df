"""Gives tests the matplotlib figure behind a picture of a report."""


def figure_of(monkeypatch, module, draw):
    """Returns the figure that `draw` turns into a picture with the `to_picture` of a module."""
    figures = []
    to_picture = module.to_picture

    def keep_figure(figure, name, alt):
        figures.append(figure)
        return to_picture(figure, name, alt)

    monkeypatch.setattr(module, "to_picture", keep_figure)
    draw()
    return figures[0]
