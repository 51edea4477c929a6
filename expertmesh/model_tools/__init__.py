"""Tools that make and look at model folders. numpy only; heavier imports are made when needed."""
